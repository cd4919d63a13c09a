/* Collectives of the simulated HCCL: what its entry points and its workings share. */
#pragma once
#include "sim.h"

enum { MAX_RANKS = 16, NAME_BYTES = 64, ROOT_INFO_BYTES = 4108, MAX_GROUPED = 256 };
enum { TIMED_OUT = 9, TOO_LARGE = 6, MISMATCH = 5, NO_SEGMENT = 2 };
enum kind { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE, BARRIER };
enum reduction { SUM, PRODUCT, MAXIMUM, MINIMUM };
/* Numbers of the element types, as HCCL numbers them. */
enum type { INT8 = 0, INT16, INT32, FLOAT16, FLOAT32, INT64, UINT64, UINT8, UINT16, UINT32, FLOAT64,
            BFLOAT16, TYPES };

struct header {
    volatile int32_t attached, arrived, phase;
    volatile uint64_t sent[MAX_RANKS][MAX_RANKS], taken[MAX_RANKS][MAX_RANKS];
    volatile uint64_t bytes[MAX_RANKS][MAX_RANKS];
    volatile int32_t wanted[MAX_RANKS]; /* how many wait for a rank to send, or to take */
    /* What each rank sends to each in the all-to-all under way: elements, and where they start. */
    uint64_t counts[MAX_RANKS][MAX_RANKS], starts[MAX_RANKS][MAX_RANKS];
};

struct comm {
    int rank, size;
    struct header *header;
    char *base;
    char name[NAME_BYTES];
    /* For the watch: jobs given out and begun, jobs under way, the stream of the latest. */
    volatile int submitted, begun, inside;
    struct stream *stream;
    volatile int *awaited;
};

struct job {
    enum kind kind;
    enum type type;
    enum reduction reduction;
    int peer;
    struct comm *comm;
    const void *send;
    void *receive;
    uint64_t count;
    uint64_t send_counts[MAX_RANKS], send_starts[MAX_RANKS];
    uint64_t receive_counts[MAX_RANKS], receive_starts[MAX_RANKS];
};

/* Joins the communicator of this name; waits until all its ranks have. */
int hccl_meet_ranks(uint32_t size, const char *name, uint32_t rank, struct comm **out);
/* Runs a job; frees it unless it is part of a graph. */
int hccl_run_job(void *job, int taped);
