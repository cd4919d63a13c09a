/* Devices, contexts, versions and memory. */
#define _GNU_SOURCE
#include "sim.h"
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEVICES = 16, CONTEXT_BASE = 0x1000, ALIGNMENT = 512 };
static const size_t TOTAL_BYTES = 64ull << 30;
/* Fresh memory is all ones: a NaN in every floating type, so that it cannot pass for a value. */
enum { FRESH = 0xFF };

static __thread int current;
static size_t used_bytes;

int sim_current_device(void) { return current; }

/* ---- devices ---- */

static int simulated_devices(void)
{
    const char *text = getenv("NPU_SIM_DEVICES");
    int count = text ? atoi(text) : 2;
    return count > MAX_DEVICES ? MAX_DEVICES : count;
}

/* Like the real runtime: ids must rise, and ids of devices that are not there are dropped. */
static int visible_devices(void)
{
    const char *text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!text || !*text)
        return simulated_devices();
    int count = 0, last = -1;
    for (char *copy = strdup(text), *part; (part = strsep(&copy, ","));) {
        int id = atoi(part);
        if (id <= last)
            return 0;
        last = id;
        count += id < simulated_devices();
    }
    return count;
}

API int aclInit(const char *config) { return OK; }
API int aclFinalize(void) { return OK; }

API int aclrtGetDeviceCount(uint32_t *count)
{
    *count = (uint32_t)visible_devices();
    return OK;
}

API int aclrtSetDevice(int32_t device)
{
    if (device < 0 || device >= visible_devices())
        return BAD_DEVICE;
    current = device;
    return OK;
}

API int aclrtGetDevice(int32_t *device)
{
    *device = current;
    return OK;
}

API int aclrtResetDevice(int32_t device) { return OK; }

API int aclrtGetCurrentContext(void **context)
{
    *context = (void *)(uintptr_t)(CONTEXT_BASE + current);
    return OK;
}

API int aclrtSetCurrentContext(void *context)
{
    return aclrtSetDevice((int32_t)((uintptr_t)context - CONTEXT_BASE));
}

API int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    if (flags)
        *flags = 0;
    if (active)
        *active = 1;
    return OK;
}

API int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    *can = 1;
    return OK;
}

API const char *aclrtGetSocName(void)
{
    const char *name = getenv("NPU_SIM_SOC");
    return name ? name : "Ascend910B1";
}

API const char *aclGetRecentErrMsg(void) { return "simulated Ascend runtime"; }

API int aclsysGetCANNVersion(int package, char *version)
{
    strcpy(version, "8.5.0");
    return OK;
}

API int aclsysGetVersionStr(char *package, char *version)
{
    strcpy(version, "8.5.0");
    return OK;
}

API int aclGetDeviceCapability(uint32_t device, int what, int64_t *value)
{
    *value = 24; /* cores */
    return OK;
}

API int aclGetCannAttributeList(const int **list, size_t *count)
{
    *list = NULL;
    *count = 0;
    return OK;
}

API int aclGetCannAttribute(int attribute, int32_t *value)
{
    *value = 0;
    return OK;
}

API size_t aclGetCompileoptSize(int option) { return 8; }

API int aclGetCompileopt(int option, char *value, size_t size)
{
    strncpy(value, "disable", size);
    return OK;
}

/* ---- settings that change nothing here ---- */

API int aclrtSetDeviceSatMode(int mode) { return OK; }
API int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
API int aclrtSetOpExecuteTimeOutV2(uint64_t us, uint64_t *actual_us) { return OK; }
API int aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }
API int aclrtSetStreamFailureMode(void *stream, uint64_t mode) { return OK; }
API int aclrtSetStreamAttribute(void *stream, int attribute, void *value) { return OK; }
API int aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) { return OK; }
API int aclrtGetLastError(int level) { return OK; }
API int aclrtPeekAtLastError(int level) { return OK; }
API int aclSetCompileopt(int option, const char *value) { return OK; }
API int aclrtSetSysParamOpt(int option, int64_t value) { return OK; }
API int aclrtCtxSetSysParamOpt(int option, int64_t value) { return OK; }

API int aclrtGetSysParamOpt(int option, int64_t *value)
{
    *value = 0;
    return OK;
}

/* ---- memory ---- */

static int allocate(void **pointer, size_t bytes)
{
    if (posix_memalign(pointer, ALIGNMENT, bytes ? bytes : ALIGNMENT))
        return NO_MEMORY;
    memset(*pointer, FRESH, bytes);
    return OK;
}

API int aclrtMalloc(void **pointer, size_t bytes, int policy)
{
    sim_count(MALLOCS);
    int error = allocate(pointer, bytes);
    if (!error)
        __atomic_add_fetch(&used_bytes, malloc_usable_size(*pointer), __ATOMIC_SEQ_CST);
    return error;
}

API int aclrtMallocAlign32(void **pointer, size_t bytes, int policy)
{
    return aclrtMalloc(pointer, bytes, policy);
}

/* Memory goes back only when no queued work can name it any more. */
API int aclrtFree(void *pointer)
{
    sim_count(FREES);
    sim_drain_all();
    __atomic_sub_fetch(&used_bytes, malloc_usable_size(pointer), __ATOMIC_SEQ_CST);
    free(pointer);
    return OK;
}

API int aclrtMallocHost(void **pointer, size_t bytes) { return allocate(pointer, bytes); }

API int aclrtFreeHost(void *pointer)
{
    sim_drain_all();
    free(pointer);
    return OK;
}

API int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total)
{
    *total = TOTAL_BYTES;
    *free_bytes = TOTAL_BYTES - used_bytes;
    return OK;
}

/* "Not registered" for everything: pinned memory is then known by torch's own allocator alone. */
API int aclrtPointerGetAttributes(const void *pointer, int32_t *attributes)
{
    memset(attributes, 0, 64);
    attributes[0] = 3;
    return OK;
}

struct copy {
    void *to;
    const void *from;
    size_t bytes;
    int value;
};

static int run_copy(void *context, int taped)
{
    struct copy *copy = context;
    if (copy->from)
        memmove(copy->to, copy->from, copy->bytes);
    else
        memset(copy->to, copy->value, copy->bytes);
    if (!taped)
        free(copy);
    return 0;
}

static int submit_copy(struct copy given, struct stream *stream)
{
    struct copy *copy = malloc(sizeof *copy);
    *copy = given;
    return sim_submit(stream, run_copy, copy);
}

/* A copy that the host waits for is no part of any stream: it does not wait for one either. */
API int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind)
{
    sim_count(COPIES);
    if (sim_any_capture())
        return WHILE_CAPTURING;
    memmove(to, from, bytes);
    return OK;
}

API int aclrtMemcpyAsync(
    void *to, size_t room, const void *from, size_t bytes, int kind, struct stream *stream)
{
    sim_count(COPIES);
    return submit_copy((struct copy){to, from, bytes, 0}, stream);
}

API int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes)
{
    memset(to, value, bytes);
    return OK;
}

API int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, struct stream *stream)
{
    return submit_copy((struct copy){to, NULL, bytes, value}, stream);
}

/* ---- kernels that torch_npu starts without torch's dispatcher: never silently nothing ---- */

static int refuse(const char *what)
{
    fprintf(stderr, "simulated Ascend runtime: %s has no body here\n", what);
    return LAUNCH_FAILED;
}

API int aclopCompileAndExecute(void) { return refuse("an operator of the compiler"); }
API int aclopCompileAndExecuteV2(void) { return refuse("an operator of the compiler"); }
API int rtKernelLaunch(void) { return refuse("a kernel"); }
API int aclrtLaunchKernelWithHostArgs(void) { return refuse("a kernel"); }
