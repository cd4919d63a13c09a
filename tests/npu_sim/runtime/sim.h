/* Parts of the simulated Ascend runtime that its source files share.
 *
 * Device memory is host memory. Work that is given to a stream is an item in that stream's queue.
 * In eager mode an item runs as soon as it is queued. In deferred mode it runs only when somebody
 * must wait for it: the latest order that streams allow, so that a program whose waits are
 * incomplete reads data that are not there yet.
 */
#pragma once
#include <stdint.h>
#include <stddef.h>

#define API __attribute__((visibility("default")))

/* Result codes of the runtime that this simulation returns. */
enum {
    OK = 0,
    BAD_DEVICE = 107001,
    BAD_STREAM = 107003,
    NO_MEMORY = 207001,
    WHILE_CAPTURING = 107030, /* "the current capture mode does not support this operation" */
    LAUNCH_FAILED = 500001,
    WORK_FAILED = 507015, /* an item that ran earlier failed */
};

/* One recording of an event; the event may be recorded again while older ones are waited for. */
struct mark {
    struct stream *stream;
    volatile int passed;
    double time_ms;
};

/* Work of a stream. `run` gets `context` and whether the item stays in a graph for later runs. */
typedef int (*runner)(void *context, int taped);
struct item {
    runner run;          /* NULL: a mark or a wait */
    void *context;
    struct mark *mark;   /* to pass, or to wait for */
    int waits, taped;
    struct item *next;
};

struct graph {
    int id;
    struct item *first, *last;
};

struct stream {
    int id, device, busy;
    struct item *first, *last;
    struct graph *capture;
};

struct event {
    struct mark *mark;     /* its latest recording, NULL before the first */
    struct graph *capture; /* set when it was recorded inside a capture */
};

enum counter {
    MALLOCS, FREES, COPIES, RECORDS, WAITS, STREAM_SYNCS, EVENT_SYNCS, DEVICE_SYNCS,
    COLLECTIVES, REPLAYS, COUNTERS
};
extern long sim_counters[COUNTERS];
void sim_count(enum counter what);

double sim_now_ms(void);
int sim_current_device(void);

/* Queues a piece of work, or runs it now, or adds it to the capture that `stream` is part of. */
int sim_submit(struct stream *stream, runner run, void *context);
/* Waits, if deferred, for all work of all streams. */
int sim_drain_all(void);
/* Runs a stream until `goal` is set. */
void sim_run_until(struct stream *stream, const volatile int *goal);
int sim_any_capture(void);
