/* Entry points of the simulated HCCL: each describes a job and gives it to a stream. */
#define _GNU_SOURCE
#include "hccl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- grouped calls: all sends of a group go out before its first receive waits ---- */

static __thread int depth, grouped_count;
static __thread struct job *grouped[MAX_GROUPED];
static __thread struct stream *grouped_streams[MAX_GROUPED];

static int submit(struct job job, struct stream *stream)
{
    struct job *j = malloc(sizeof *j);
    *j = job;
    sim_count(COLLECTIVES);
    job.comm->stream = stream;
    __atomic_add_fetch(&job.comm->submitted, 1, __ATOMIC_SEQ_CST);
    if (!depth)
        return sim_submit(stream, hccl_run_job, j);
    if (grouped_count == MAX_GROUPED)
        return TOO_LARGE;
    grouped[grouped_count] = j;
    grouped_streams[grouped_count++] = stream;
    return OK;
}

API int HcclGroupStart(void)
{
    depth++;
    return OK;
}

API int HcclGroupEnd(void)
{
    if (--depth)
        return OK;
    int error = OK;
    for (int sends = 1; sends >= 0; sends--)
        for (int index = 0; index < grouped_count; index++) {
            struct job *j = grouped[index];
            if (!j || (j->kind == SEND) != sends)
                continue;
            grouped[index] = NULL; /* it may be gone when this returns */
            error |= sim_submit(grouped_streams[index], hccl_run_job, j);
        }
    grouped_count = 0;
    return error;
}

/* ---- communicators ---- */

API int HcclGetRootInfo(char *info)
{
    static int made;
    memset(info, 0, ROOT_INFO_BYTES);
    snprintf(info, NAME_BYTES, "/npu_sim_%d_%d", getpid(), made++);
    return OK;
}

API int HcclCommInitRootInfo(uint32_t size, const char *info, uint32_t rank, struct comm **out)
{
    return hccl_meet_ranks(size, info, rank, out);
}

API int HcclCommInitRootInfoConfig(
    uint32_t size, const char *info, uint32_t rank, const void *config, struct comm **out)
{
    return hccl_meet_ranks(size, info, rank, out);
}

API int HcclGetCommName(struct comm *c, char *name)
{
    strcpy(name, c->name + 1);
    return OK;
}

API int HcclCommDestroy(struct comm *c) { return OK; }
API uint32_t HcclGetCommConfigCapability(void) { return 0; }

API int HcclGetCommAsyncError(struct comm *c, int *error)
{
    *error = OK;
    return OK;
}

/* ---- entry points ---- */

API int HcclAllReduce(const void *send, void *receive, uint64_t count, int type, int reduction,
                      struct comm *c, struct stream *stream)
{
    return submit((struct job){.kind = ALL_REDUCE, .type = type, .reduction = reduction, .comm = c,
                               .send = send, .receive = receive, .count = count}, stream);
}

API int HcclReduceScatter(const void *send, void *receive, uint64_t count, int type, int reduction,
                          struct comm *c, struct stream *stream)
{
    return submit((struct job){.kind = REDUCE_SCATTER, .type = type, .reduction = reduction,
                               .comm = c, .send = send, .receive = receive, .count = count}, stream);
}

API int HcclBroadcast(void *buffer, uint64_t count, int type, uint32_t root, struct comm *c,
                      struct stream *stream)
{
    return submit((struct job){.kind = BROADCAST, .type = type, .comm = c, .peer = (int)root,
                               .send = buffer, .receive = buffer, .count = count}, stream);
}

API int HcclAllGather(const void *send, void *receive, uint64_t count, int type, struct comm *c,
                      struct stream *stream)
{
    return submit((struct job){.kind = ALL_GATHER, .type = type, .comm = c, .send = send,
                               .receive = receive, .count = count}, stream);
}

API int HcclAlltoAllV(const void *send, const uint64_t *send_counts, const uint64_t *send_starts,
                      int type, void *receive, const uint64_t *receive_counts,
                      const uint64_t *receive_starts, int receive_type, struct comm *c,
                      struct stream *stream)
{
    struct job job = {.kind = ALL_TO_ALL, .type = type, .comm = c, .send = send,
                      .receive = receive};
    for (int peer = 0; peer < c->size; peer++) {
        job.send_counts[peer] = send_counts[peer];
        job.send_starts[peer] = send_starts[peer];
        job.receive_counts[peer] = receive_counts[peer];
        job.receive_starts[peer] = receive_starts[peer];
    }
    return submit(job, stream);
}

API int HcclAlltoAll(const void *send, uint64_t send_count, int type, void *receive,
                     uint64_t receive_count, int receive_type, struct comm *c,
                     struct stream *stream)
{
    uint64_t sends[MAX_RANKS], send_at[MAX_RANKS], receives[MAX_RANKS], receive_at[MAX_RANKS];
    for (int peer = 0; peer < c->size; peer++) {
        sends[peer] = send_count;
        send_at[peer] = send_count * peer;
        receives[peer] = receive_count;
        receive_at[peer] = receive_count * peer;
    }
    return HcclAlltoAllV(send, sends, send_at, type, receive, receives, receive_at, receive_type, c,
                         stream);
}

API int HcclSend(const void *buffer, uint64_t count, int type, uint32_t peer, struct comm *c,
                 struct stream *stream)
{
    return submit((struct job){.kind = SEND, .type = type, .comm = c, .peer = (int)peer,
                               .send = buffer, .count = count}, stream);
}

API int HcclRecv(void *buffer, uint64_t count, int type, uint32_t peer, struct comm *c,
                 struct stream *stream)
{
    return submit((struct job){.kind = RECEIVE, .type = type, .comm = c, .peer = (int)peer,
                               .receive = buffer, .count = count}, stream);
}

API int HcclBarrier(struct comm *c, struct stream *stream)
{
    return submit((struct job){.kind = BARRIER, .comm = c}, stream);
}

struct transfer {
    int receives;
    void *buffer;
    uint64_t count;
    int type;
    uint32_t peer;
};

API int HcclBatchSendRecv(struct transfer *transfers, uint32_t count, struct comm *c,
                          struct stream *stream)
{
    HcclGroupStart();
    for (uint32_t index = 0; index < count; index++) {
        struct transfer *t = &transfers[index];
        if (t->receives)
            HcclRecv(t->buffer, t->count, t->type, t->peer, c, stream);
        else
            HcclSend(t->buffer, t->count, t->type, t->peer, c, stream);
    }
    return HcclGroupEnd();
}
