/* Collectives between processes of one machine, over shared memory.
 *
 * Every communicator is one shared segment: a header, an arena for each rank that the others read
 * between two barriers, and a mailbox for each ordered pair of ranks. A send fills its mailbox
 * and does not wait for the receiver, so that both directions of a pair can be under way.
 *
 * A real device goes on while its host sleeps. In deferred order a rank whose host waits for
 * nothing would never come to its part of an exchange, so a thread watches the communicators: once
 * others wait for this rank, it runs the stream that holds the exchange up to it, and no further.
 */
#define _GNU_SOURCE
#include "hccl.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SPINS = 20, NAP_US = 100, WATCH_US = 500, PATIENT_WATCHES = 4, MAX_COMMS = 32 };
static const uint64_t HEADER_BYTES = 1ull << 20, ARENA_BYTES = 64ull << 20, MAIL_BYTES = 16ull << 20;
static const double PATIENCE_MS = 120e3;

static const char *const NAMES[] = {
    "all-reduce", "broadcast", "all-gather", "reduce-scatter", "all-to-all", "send", "receive",
    "barrier",
};
static const uint64_t ELEMENT_BYTES[TYPES] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};

static char *arena(struct comm *c, int rank) { return c->base + HEADER_BYTES + rank * ARENA_BYTES; }

static char *mailbox(struct comm *c, int from, int to)
{
    return arena(c, c->size) + (uint64_t)(from * c->size + to) * MAIL_BYTES;
}

/* ---- waiting for other processes ---- */

static void nap(int *spins)
{
    if (++*spins < SPINS)
        sched_yield();
    else
        usleep(NAP_US);
}

#define AWAIT(condition, what)                                                                  \
    do {                                                                                        \
        double started = sim_now_ms();                                                          \
        for (int spins = 0; !(condition); nap(&spins))                                          \
            if (sim_now_ms() - started > PATIENCE_MS) {                                         \
                fprintf(stderr, "simulated HCCL: rank %d waited too long in %s\n", c->rank, what); \
                return TIMED_OUT;                                                               \
            }                                                                                   \
    } while (0)

static int meet(struct comm *c, const char *what)
{
    int phase = c->header->phase;
    if (__atomic_add_fetch(&c->header->arrived, 1, __ATOMIC_SEQ_CST) == c->size) {
        c->header->arrived = 0;
        __atomic_add_fetch(&c->header->phase, 1, __ATOMIC_SEQ_CST);
    } else {
        AWAIT(c->header->phase != phase, what);
    }
    return OK;
}

/* ---- element arithmetic of reductions ---- */

static double load(const char *data, uint64_t index, enum type type)
{
    uint32_t bits;
    float value;
    switch (type) {
    case FLOAT32: return ((const float *)data)[index];
    case FLOAT64: return ((const double *)data)[index];
    case FLOAT16: return (double)((const _Float16 *)data)[index];
    case BFLOAT16:
        bits = (uint32_t)((const uint16_t *)data)[index] << 16;
        memcpy(&value, &bits, sizeof value);
        return value;
    case INT8: return ((const int8_t *)data)[index];
    case UINT8: return ((const uint8_t *)data)[index];
    case INT32: return ((const int32_t *)data)[index];
    default: return (double)((const int64_t *)data)[index];
    }
}

static void store(char *data, uint64_t index, enum type type, double wide)
{
    uint32_t bits;
    float value = (float)wide;
    switch (type) {
    case FLOAT32: ((float *)data)[index] = value; break;
    case FLOAT64: ((double *)data)[index] = wide; break;
    case FLOAT16: ((_Float16 *)data)[index] = (_Float16)value; break;
    case BFLOAT16: /* round half to even */
        memcpy(&bits, &value, sizeof bits);
        ((uint16_t *)data)[index] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        break;
    case INT8: ((int8_t *)data)[index] = (int8_t)wide; break;
    case UINT8: ((uint8_t *)data)[index] = (uint8_t)wide; break;
    case INT32: ((int32_t *)data)[index] = (int32_t)wide; break;
    default: ((int64_t *)data)[index] = (int64_t)wide; break;
    }
}

static double combine(double a, double b, enum reduction how)
{
    switch (how) {
    case SUM: return a + b;
    case PRODUCT: return a * b;
    case MAXIMUM: return a > b ? a : b;
    default: return a < b ? a : b;
    }
}

/* Reduces, in rank order, `count` elements that stand `first` elements into every arena. */
static void reduce(struct job *j, uint64_t first)
{
    for (uint64_t i = 0; i < j->count; i++) {
        double value = load(arena(j->comm, 0), first + i, j->type);
        for (int rank = 1; rank < j->comm->size; rank++)
            value = combine(value, load(arena(j->comm, rank), first + i, j->type), j->reduction);
        store(j->receive, i, j->type, value);
    }
}

/* ---- the collectives ---- */

static int publish(struct job *j, uint64_t bytes)
{
    if (bytes > ARENA_BYTES)
        return TOO_LARGE;
    memcpy(arena(j->comm, j->comm->rank), j->send, bytes);
    return meet(j->comm, NAMES[j->kind]);
}

static int all_gather(struct job *j, uint64_t bytes)
{
    int error = publish(j, bytes);
    for (int rank = 0; !error && rank < j->comm->size; rank++)
        memcpy((char *)j->receive + rank * bytes, arena(j->comm, rank), bytes);
    return error ? error : meet(j->comm, NAMES[j->kind]);
}

static int broadcast(struct job *j, uint64_t bytes)
{
    int error = publish(j, j->comm->rank == j->peer ? bytes : 0);
    if (error)
        return error;
    memcpy(j->receive, arena(j->comm, j->peer), bytes);
    return meet(j->comm, NAMES[j->kind]);
}

static int reduce_all(struct job *j, uint64_t bytes)
{
    int scatter = j->kind == REDUCE_SCATTER;
    int error = publish(j, scatter ? bytes * j->comm->size : bytes);
    if (error)
        return error;
    reduce(j, scatter ? j->comm->rank * j->count : 0);
    return meet(j->comm, NAMES[j->kind]);
}

static int all_to_all(struct job *j, uint64_t element)
{
    struct comm *c = j->comm;
    uint64_t end = 0;
    for (int peer = 0; peer < c->size; peer++) {
        c->header->counts[c->rank][peer] = j->send_counts[peer];
        c->header->starts[c->rank][peer] = j->send_starts[peer];
        if (j->send_starts[peer] + j->send_counts[peer] > end)
            end = j->send_starts[peer] + j->send_counts[peer];
    }
    int error = publish(j, end * element);
    for (int peer = 0; !error && peer < c->size; peer++) {
        if (c->header->counts[peer][c->rank] != j->receive_counts[peer])
            error = MISMATCH;
        else
            memcpy((char *)j->receive + j->receive_starts[peer] * element,
                   arena(c, peer) + c->header->starts[peer][c->rank] * element,
                   j->receive_counts[peer] * element);
    }
    int left = meet(c, NAMES[j->kind]);
    return error ? error : left;
}

static int send(struct job *j, uint64_t bytes)
{
    struct comm *c = j->comm;
    struct header *h = c->header;
    if (bytes > MAIL_BYTES)
        return TOO_LARGE;
    __atomic_add_fetch(&h->wanted[j->peer], 1, __ATOMIC_SEQ_CST);
    AWAIT(h->sent[c->rank][j->peer] == h->taken[c->rank][j->peer], "send");
    __atomic_sub_fetch(&h->wanted[j->peer], 1, __ATOMIC_SEQ_CST);
    memcpy(mailbox(c, c->rank, j->peer), j->send, bytes);
    h->bytes[c->rank][j->peer] = bytes;
    __atomic_add_fetch(&h->sent[c->rank][j->peer], 1, __ATOMIC_SEQ_CST);
    return OK;
}

static int receive(struct job *j, uint64_t bytes)
{
    struct comm *c = j->comm;
    struct header *h = c->header;
    __atomic_add_fetch(&h->wanted[j->peer], 1, __ATOMIC_SEQ_CST);
    AWAIT(h->sent[j->peer][c->rank] > h->taken[j->peer][c->rank], "receive");
    __atomic_sub_fetch(&h->wanted[j->peer], 1, __ATOMIC_SEQ_CST);
    int error = h->bytes[j->peer][c->rank] == bytes ? OK : MISMATCH;
    if (!error)
        memcpy(j->receive, mailbox(c, j->peer, c->rank), bytes);
    __atomic_add_fetch(&h->taken[j->peer][c->rank], 1, __ATOMIC_SEQ_CST);
    return error;
}

static void begin(struct comm *c)
{
    __atomic_add_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&c->begun, 1, __ATOMIC_SEQ_CST);
}

int hccl_run_job(void *context, int taped)
{
    struct job *j = context;
    struct comm *c = j->comm;
    begin(c);
    uint64_t element = ELEMENT_BYTES[j->type], bytes = j->count * element;
    int error = OK;
    switch (j->kind) {
    case ALL_REDUCE:
    case REDUCE_SCATTER: error = reduce_all(j, bytes); break;
    case BROADCAST: error = broadcast(j, bytes); break;
    case ALL_GATHER: error = all_gather(j, bytes); break;
    case ALL_TO_ALL: error = all_to_all(j, element); break;
    case SEND: error = send(j, bytes); break;
    case RECEIVE: error = receive(j, bytes); break;
    case BARRIER: error = meet(j->comm, NAMES[BARRIER]); break;
    }
    if (error)
        fprintf(stderr, "simulated HCCL: %s failed with %d on rank %d\n", NAMES[j->kind], error,
                j->comm->rank);
    __atomic_sub_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    if (c->awaited)
        *c->awaited = 1;
    if (!taped)
        free(j);
    return error;
}

/* ---- the watch ---- */

static struct comm *comms[MAX_COMMS];
static volatile int comm_count, watching;

static int is_awaited(struct comm *c)
{
    struct header *h = c->header;
    return !c->inside && c->submitted > c->begun && (h->arrived > 0 || h->wanted[c->rank] > 0);
}

/* Sees others wait a few times before it acts: the host may be about to wait itself. */
static void *watch(void *unused)
{
    int seen[MAX_COMMS] = {0};
    while (watching) {
        usleep(WATCH_US);
        for (int index = 0; index < comm_count; index++) {
            struct comm *c = comms[index];
            seen[index] = is_awaited(c) ? seen[index] + 1 : 0;
            if (seen[index] < PATIENT_WATCHES)
                continue;
            volatile int done = 0;
            c->awaited = &done;
            sim_run_until(c->stream, &done);
            c->awaited = NULL;
            seen[index]--; /* its host sleeps, most likely: act sooner the next time */
        }
    }
    return NULL;
}

static void watch_over(struct comm *c)
{
    pthread_t thread;
    if (comm_count == MAX_COMMS)
        return;
    comms[comm_count] = c;
    comm_count++;
    if (!watching) {
        watching = 1;
        pthread_create(&thread, NULL, watch, NULL);
        pthread_detach(thread);
    }
}

API void sim_stop_watch(void) { watching = 0; }

/* ---- communicators ---- */

int hccl_meet_ranks(uint32_t size, const char *name, uint32_t rank, struct comm **out)
{
    struct comm *c = calloc(1, sizeof *c);
    c->rank = (int)rank;
    c->size = (int)size;
    snprintf(c->name, NAME_BYTES, "%s", name);
    uint64_t bytes = HEADER_BYTES + size * ARENA_BYTES + (uint64_t)size * size * MAIL_BYTES;
    int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
    if (size > MAX_RANKS || file < 0 || ftruncate(file, (off_t)bytes))
        return NO_SEGMENT;
    c->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    c->header = (struct header *)c->base;
    __atomic_add_fetch(&c->header->attached, 1, __ATOMIC_SEQ_CST);
    AWAIT(c->header->attached >= c->size, "the start of a communicator");
    if (!rank)
        shm_unlink(c->name);
    watch_over(c);
    *out = c;
    return OK;
}
