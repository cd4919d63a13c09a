/* Streams, events and graphs: in which order queued work runs. */
#define _GNU_SOURCE
#include "sim.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { RUN_ONCE = 1, RUN_TAPED = 2, DROP = 3 };
/* Runs, or forgets, the piece of work that the host language knows by this number. */
API int (*sim_kernel)(int how, uint64_t number) = NULL;
API long sim_counters[COUNTERS];

/* Of the interpreter in whose process this runs; missing in a process without one. */
extern int PyGILState_Check(void) __attribute__((weak));
extern void *PyEval_SaveThread(void) __attribute__((weak));
extern void PyEval_RestoreThread(void *state) __attribute__((weak));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;
static struct stream default_stream;
static struct stream **streams;
static int stream_count, next_id = 1, active_captures, deferred, failed;
static __thread int draining;

void sim_count(enum counter what) { __atomic_add_fetch(&sim_counters[what], 1, __ATOMIC_SEQ_CST); }

double sim_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

int sim_any_capture(void) { return active_captures > 0; }

static struct stream *the(struct stream *stream) { return stream ? stream : &default_stream; }

/* ---- queues ---- */

static struct item *new_item(runner run, void *context)
{
    struct item *item = calloc(1, sizeof *item);
    item->run = run;
    item->context = context;
    return item;
}

static void append(struct item **first, struct item **last, struct item *item)
{
    item->next = NULL;
    if (*first)
        (*last)->next = item;
    else
        *first = item;
    *last = item;
}

/* Takes the next item of a stream once nobody else runs it; NULL when there is none, or when the
 * goal was reached meanwhile: whoever ran the stream may be waiting for this thread by then. */
static struct item *take(struct stream *stream, const volatile int *goal)
{
    pthread_mutex_lock(&lock);
    while (stream->busy && !(goal && *goal))
        pthread_cond_wait(&idle, &lock);
    struct item *item = goal && *goal ? NULL : stream->first;
    if (item) {
        stream->first = item->next;
        stream->busy = 1;
    }
    pthread_mutex_unlock(&lock);
    return item;
}

static void release(struct stream *stream)
{
    pthread_mutex_lock(&lock);
    stream->busy = 0;
    pthread_cond_broadcast(&idle);
    pthread_mutex_unlock(&lock);
}

static void run_until(struct stream *stream, const volatile int *goal);

static void run_item(struct item *item)
{
    if (item->run) {
        if (item->run(item->context, item->taped))
            failed = WORK_FAILED;
    } else if (!item->waits) {
        item->mark->time_ms = sim_now_ms();
        item->mark->passed = 1;
    } else if (!item->mark->passed) {
        run_until(item->mark->stream, &item->mark->passed);
    }
}

/* Runs a stream until `goal` is set, or until it is empty where there is no goal.
 * Whoever waits here lets go of the interpreter: another thread may need it to run a kernel. */
static void run_until(struct stream *stream, const volatile int *goal)
{
    int holds_interpreter = !draining && PyGILState_Check && PyGILState_Check();
    void *state = holds_interpreter ? PyEval_SaveThread() : NULL;
    draining++;
    struct item *item;
    while ((item = take(stream, goal))) {
        run_item(item);
        release(stream);
        free(item);
    }
    draining--;
    if (holds_interpreter)
        PyEval_RestoreThread(state);
}

void sim_run_until(struct stream *stream, const volatile int *goal)
{
    run_until(the(stream), goal);
}

int sim_drain_all(void)
{
    if (draining) /* memory that is freed while work runs: that work is in order already */
        return OK;
    run_until(&default_stream, NULL);
    for (int index = 0; index < stream_count; index++)
        run_until(streams[index], NULL);
    return failed;
}

static int enqueue(struct stream *stream, struct item *item)
{
    pthread_mutex_lock(&lock);
    append(&stream->first, &stream->last, item);
    pthread_mutex_unlock(&lock);
    if (!deferred)
        run_until(stream, NULL);
    return failed;
}

int sim_submit(struct stream *given, runner run, void *context)
{
    struct stream *stream = the(given);
    struct item *item = new_item(run, context);
    if (!stream->capture)
        return enqueue(stream, item);
    item->taped = 1;
    append(&stream->capture->first, &stream->capture->last, item);
    return OK;
}

/* ---- the host language's side ---- */

API void sim_set_deferred(int on)
{
    sim_drain_all();
    deferred = on;
}

/* 0: work given to this stream runs now; 1: it is queued; 2: it becomes part of a graph. */
API int sim_mode(struct stream *stream)
{
    return the(stream)->capture ? 2 : deferred;
}

static int call_kernel(void *context, int taped)
{
    return sim_kernel ? sim_kernel(taped ? RUN_TAPED : RUN_ONCE, (uint64_t)(uintptr_t)context) : 0;
}

API int sim_launch(struct stream *stream, uint64_t number)
{
    return sim_submit(stream, call_kernel, (void *)(uintptr_t)number);
}

/* Forgets that work has failed. */
API void sim_forgive(void) { failed = 0; }

/* Lets one stream run dry, as a device that is quick with this stream alone would. */
API void sim_run_stream(struct stream *stream) { run_until(the(stream), NULL); }

API long sim_pending(void)
{
    long count = 0;
    pthread_mutex_lock(&lock);
    for (int index = -1; index < stream_count; index++)
        for (struct item *i = (index < 0 ? &default_stream : streams[index])->first; i; i = i->next)
            count++;
    pthread_mutex_unlock(&lock);
    return count;
}

/* ---- streams ---- */

API int aclrtCreateStream(struct stream **out)
{
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    stream->id = next_id++;
    stream->device = sim_current_device();
    streams = realloc(streams, (stream_count + 1) * sizeof *streams);
    streams[stream_count++] = stream;
    pthread_mutex_unlock(&lock);
    *out = stream;
    return OK;
}

API int aclrtCreateStreamWithConfig(struct stream **out, uint32_t priority, uint32_t flags)
{
    return aclrtCreateStream(out);
}

/* Streams live as long as the process: their last work may still be queued. */
API int aclrtDestroyStream(struct stream *stream) { return OK; }
API int aclrtDestroyStreamForce(struct stream *stream) { return OK; }

API int aclrtStreamGetId(struct stream *stream, int32_t *id)
{
    *id = the(stream)->id;
    return OK;
}

API int aclrtSynchronizeStream(struct stream *stream)
{
    sim_count(STREAM_SYNCS);
    if (the(stream)->capture)
        return WHILE_CAPTURING;
    run_until(the(stream), NULL);
    return failed;
}

API int aclrtSynchronizeStreamWithTimeout(struct stream *stream, int32_t timeout_ms)
{
    return aclrtSynchronizeStream(stream);
}

API int aclrtSynchronizeDevice(void)
{
    sim_count(DEVICE_SYNCS);
    return active_captures ? WHILE_CAPTURING : sim_drain_all();
}

API int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) { return aclrtSynchronizeDevice(); }

API int aclrtStreamQuery(struct stream *stream, int *status)
{
    *status = the(stream)->first ? 1 : 0; /* 0: all its work is done */
    return OK;
}

/* ---- events ---- */

static int new_event(struct event **out)
{
    *out = calloc(1, sizeof **out);
    return OK;
}

API int aclrtCreateEvent(struct event **out) { return new_event(out); }
API int aclrtCreateEventWithFlag(struct event **out, uint32_t flag) { return new_event(out); }
API int aclrtCreateEventExWithFlag(struct event **out, uint32_t flag) { return new_event(out); }

/* Marks outlive their event, since a queue may hold them; a few bytes each. */
API int aclrtDestroyEvent(struct event *event)
{
    free(event);
    return OK;
}

API int aclrtResetEvent(struct event *event, struct stream *stream) { return OK; }

API int aclrtRecordEvent(struct event *event, struct stream *given)
{
    struct stream *stream = the(given);
    sim_count(RECORDS);
    event->capture = stream->capture;
    if (event->capture)
        return OK;
    struct item *item = new_item(NULL, NULL);
    struct mark *mark = calloc(1, sizeof *mark);
    mark->stream = stream;
    item->mark = event->mark = mark;
    return enqueue(stream, item);
}

API int aclrtStreamWaitEvent(struct stream *given, struct event *event)
{
    struct stream *stream = the(given);
    sim_count(WAITS);
    if (event->capture) { /* the waiting stream joins the capture */
        stream->capture = event->capture;
        return OK;
    }
    if (!event->mark || stream->capture) /* never recorded; or an order that was there before */
        return OK;
    struct item *item = new_item(NULL, NULL);
    item->mark = event->mark;
    item->waits = 1;
    return enqueue(stream, item);
}

API int aclrtSynchronizeEvent(struct event *event)
{
    sim_count(EVENT_SYNCS);
    if (event->capture)
        return WHILE_CAPTURING;
    if (event->mark && !event->mark->passed)
        run_until(event->mark->stream, &event->mark->passed);
    return failed;
}

API int aclrtSynchronizeEventWithTimeout(struct event *event, int32_t timeout_ms)
{
    return aclrtSynchronizeEvent(event);
}

API int aclrtQueryEventStatus(struct event *event, int *status)
{
    *status = !event->mark || event->mark->passed; /* 1: complete */
    return OK;
}

API int aclrtQueryEventWaitStatus(struct event *event, int *status)
{
    *status = 0; /* 0: complete */
    return OK;
}

API int aclrtEventElapsedTime(float *ms, struct event *start, struct event *end)
{
    if (!start->mark || !end->mark)
        return BAD_STREAM;
    *ms = (float)(end->mark->time_ms - start->mark->time_ms);
    return OK;
}

/* ---- graphs ---- */

API int aclmdlRICaptureBegin(struct stream *stream, int mode)
{
    if (!stream || stream->capture)
        return WHILE_CAPTURING;
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture->id = __atomic_fetch_add(&next_id, 1, __ATOMIC_SEQ_CST);
    active_captures++;
    return OK;
}

API int aclmdlRICaptureGetInfo(struct stream *stream, int *status, struct graph **graph)
{
    struct graph *capture = the(stream)->capture;
    *status = capture ? 1 : 0;
    if (graph)
        *graph = capture;
    return OK;
}

API int aclmdlRICaptureEnd(struct stream *stream, struct graph **graph)
{
    struct graph *capture = the(stream)->capture;
    if (!capture)
        return BAD_STREAM;
    for (int index = 0; index < stream_count; index++)
        if (streams[index]->capture == capture)
            streams[index]->capture = NULL;
    active_captures--;
    *graph = capture;
    return OK;
}

API int aclmdlRICaptureThreadExchangeMode(int *mode) { return OK; }

API int aclmdlRIGetId(struct graph *graph, uint32_t *id)
{
    *id = (uint32_t)graph->id;
    return OK;
}

API int aclmdlRIExecuteAsync(struct graph *graph, struct stream *stream)
{
    sim_count(REPLAYS);
    for (struct item *taped = graph->first; taped; taped = taped->next) {
        struct item *item = new_item(taped->run, taped->context);
        item->taped = 1;
        int error = enqueue(the(stream), item);
        if (error)
            return error;
    }
    return OK;
}

API int aclmdlRIDestroy(struct graph *graph)
{
    sim_drain_all();
    for (struct item *item = graph->first; item; item = item->next)
        if (item->run == call_kernel && sim_kernel)
            sim_kernel(DROP, (uint64_t)(uintptr_t)item->context);
    return OK;
}
