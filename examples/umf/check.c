/* Two processes use one tensor of a UMF pool over Highwater. The second process is this program, started again with an argument. */
#define _POSIX_C_SOURCE 200809L
#include "../c/check.h"
#include "highwater_provider.h"

#include <spawn.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <umf.h>
#include <umf/ipc.h>
#include <umf/pools/pool_disjoint.h>
#include <unistd.h>

enum { BYTES = 5000 };

#define UMF(call) EXPECT((call) == UMF_RESULT_SUCCESS)

extern char **environ;

static highwater_runtime *runtime;
static highwater_device *device;
static highwater_stream *stream;

/* Kernels take the address. This program's kernels are fills and reads of Highwater, which take a buffer. */
static highwater_buffer *view(void *address) {
    highwater_buffer *buffer = NULL;
    CHECK(highwater_device_adopt(device, (uint64_t)(uintptr_t)address, BYTES, NULL, NULL, &buffer));
    return buffer;
}

static umf_memory_pool_handle_t make_pool(umf_memory_provider_handle_t *provider) {
    highwater_provider_params params = {.runtime = runtime, .ordinal = 0};
    umf_disjoint_pool_params_handle_t limits = NULL;
    umf_memory_pool_handle_t pool = NULL;
    UMF(umfMemoryProviderCreate(highwater_provider_ops(), &params, provider));
    UMF(umfDisjointPoolParamsCreate(&limits));
    UMF(umfPoolCreate(umfDisjointPoolOps(), *provider, limits, UMF_POOL_CREATE_FLAG_NONE, &pool));
    UMF(umfDisjointPoolParamsDestroy(limits));
    return pool;
}

/* Reads the handle from the first process, and writes to its tensor. */
static void second(umf_memory_pool_handle_t pool) {
    size_t bytes = 0;
    void *address = NULL;
    umf_ipc_handler_handle_t handler = NULL;
    EXPECT(fread(&bytes, sizeof bytes, 1, stdin) == 1 && bytes < 4096);
    umf_ipc_handle_t handle = malloc(bytes);
    EXPECT(handle != NULL && fread(handle, bytes, 1, stdin) == 1);
    UMF(umfPoolGetIPCHandler(pool, &handler));
    UMF(umfOpenIPCHandle(handler, handle, &address));
    free(handle);
    highwater_buffer *tensor = view(address);
    unsigned char last = 0;
    CHECK(highwater_read(stream, tensor, BYTES - 1, &last, 1));
    EXPECT(last == 1);
    CHECK(highwater_fill(stream, tensor, 0, BYTES, 2));
    CHECK(highwater_stream_synchronize(stream));
    CHECK(highwater_buffer_release(&tensor));
    UMF(umfCloseIPCHandle(address));
}

static void first(umf_memory_provider_handle_t provider, umf_memory_pool_handle_t pool, char *program) {
    const char *message = NULL;
    int32_t code = 0;
    size_t bytes = 0;
    int ends[2], status = -1;
    umf_ipc_handle_t handle = NULL;
    void *refused = NULL;
    EXPECT(umfMemoryProviderAlloc(provider, SIZE_MAX / 2, 0, &refused) != UMF_RESULT_SUCCESS && refused == NULL);
    EXPECT(umfMemoryProviderGetLastNativeError(provider, &message, &code) == UMF_RESULT_SUCCESS);
    EXPECT(code == HIGHWATER_ERROR_OUT_OF_MEMORY && strstr(message, "out of memory") != NULL);

    void *tensor = umfPoolMalloc(pool, BYTES), *other = umfPoolMalloc(pool, BYTES);
    EXPECT(tensor != NULL && other != NULL && tensor != other);
    highwater_buffer *values = view(tensor);
    CHECK(highwater_fill(stream, values, 0, BYTES, 1));
    UMF(umfGetIPCHandle(tensor, &handle, &bytes));
    CHECK(highwater_stream_synchronize(stream)); /* A handle that UMF kept from earlier knows no later work. */

    char *arguments[] = {program, "second", NULL};
    posix_spawn_file_actions_t actions;
    pid_t child = 0;
    EXPECT(pipe(ends) == 0 && posix_spawn_file_actions_init(&actions) == 0);
    EXPECT(posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO) == 0);
    EXPECT(posix_spawn_file_actions_addclose(&actions, ends[1]) == 0);
    EXPECT(posix_spawn(&child, "/proc/self/exe", &actions, NULL, arguments, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
    EXPECT(write(ends[1], &bytes, sizeof bytes) == sizeof bytes && write(ends[1], handle, bytes) == (ssize_t)bytes);
    close(ends[1]);
    EXPECT(waitpid(child, &status, 0) == child && status == 0);

    unsigned char last = 0;
    CHECK(highwater_read(stream, values, BYTES - 1, &last, 1));
    EXPECT(last == 2);
    CHECK(highwater_buffer_release(&values));
    UMF(umfPutIPCHandle(handle));
    UMF(umfPoolFree(pool, other));
    UMF(umfPoolFree(pool, tensor));
    puts("two processes used one tensor of a UMF pool");
}

int main(int count, char **arguments) {
    umf_memory_provider_handle_t provider = NULL;
    runtime = open_any();
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &stream));
    umf_memory_pool_handle_t pool = make_pool(&provider);
    if (count > 1) {
        second(pool);
    } else {
        first(provider, pool, arguments[0]);
    }
    UMF(umfPoolDestroy(pool));
    UMF(umfMemoryProviderDestroy(provider));
    CHECK(highwater_stream_release(&stream));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
