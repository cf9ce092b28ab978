#include "highwater_provider.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of an IPC handle: the text of a ticket with its end. */
enum { TICKET_BYTES = 512 };

/* Vendors align device memory to 256 bytes, and share it in pages of 2 MiB. */
static const size_t page = (size_t)2 << 20;

/* One allocation, made here or opened. UMF asks by address. A provider has few: UMF's pools divide them. */
struct block {
    void *address;
    highwater_buffer *buffer;
    struct block *next;
};

struct provider {
    highwater_runtime *runtime;
    highwater_device *device;
    pthread_mutex_t lock;
    struct block *blocks;
};

/* The message of the last error of the library, which UMF reads after UMF_RESULT_ERROR_MEMORY_PROVIDER_SPECIFIC. It belongs to the thread. */
static _Thread_local highwater_status last_status;

static umf_result_t result_of(highwater_status status) {
    last_status = status;
    switch (status) {
    case HIGHWATER_OK:
        return UMF_RESULT_SUCCESS;
    case HIGHWATER_ERROR_INVALID_ARGUMENT:
        return UMF_RESULT_ERROR_INVALID_ARGUMENT;
    case HIGHWATER_ERROR_UNSUPPORTED:
        return UMF_RESULT_ERROR_NOT_SUPPORTED;
    default:
        return UMF_RESULT_ERROR_MEMORY_PROVIDER_SPECIFIC;
    }
}

/* Keeps a buffer by its address, which it writes to `address`. Takes the buffer. */
static umf_result_t keep(struct provider *provider, highwater_buffer *buffer, void **address) {
    uint64_t number = 0;
    struct block *block = malloc(sizeof *block);
    highwater_status status = block ? highwater_buffer_address(buffer, &number) : HIGHWATER_OK;
    if (!block || status != HIGHWATER_OK) {
        free(block);
        highwater_buffer_release(&buffer);
        return block ? result_of(status) : UMF_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    pthread_mutex_lock(&provider->lock);
    *block = (struct block){.address = (void *)(uintptr_t)number, .buffer = buffer, .next = provider->blocks};
    provider->blocks = block;
    pthread_mutex_unlock(&provider->lock);
    *address = block->address;
    return UMF_RESULT_SUCCESS;
}

/* Returns the buffer of an address, and forgets it if `take` is set. Null if the provider has none. */
static highwater_buffer *find(struct provider *provider, const void *address, bool take) {
    highwater_buffer *buffer = NULL;
    struct block *taken = NULL;
    pthread_mutex_lock(&provider->lock);
    for (struct block **link = &provider->blocks; *link; link = &(*link)->next) {
        if ((*link)->address == address) {
            buffer = (*link)->buffer;
            if (take) {
                taken = *link;
                *link = taken->next;
            }
            break;
        }
    }
    pthread_mutex_unlock(&provider->lock);
    free(taken);
    return buffer;
}

static umf_result_t release(struct provider *provider, void *address) {
    highwater_buffer *buffer = find(provider, address, true);
    return buffer ? result_of(highwater_buffer_release(&buffer)) : UMF_RESULT_ERROR_INVALID_ARGUMENT;
}

static umf_result_t initialize(const void *params, void **made) {
    const highwater_provider_params *given = params;
    if (!given || !given->runtime) {
        return UMF_RESULT_ERROR_INVALID_ARGUMENT;
    }
    struct provider *provider = calloc(1, sizeof *provider);
    if (!provider) {
        return UMF_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    provider->runtime = given->runtime;
    highwater_status status = highwater_device_get(given->runtime, given->ordinal, &provider->device);
    if (status != HIGHWATER_OK) {
        free(provider);
        return result_of(status);
    }
    pthread_mutex_init(&provider->lock, NULL);
    *made = provider;
    return UMF_RESULT_SUCCESS;
}

static umf_result_t finalize(void *self) {
    struct provider *provider = self;
    while (provider->blocks) {
        release(provider, provider->blocks->address);
    }
    highwater_device_release(&provider->device);
    pthread_mutex_destroy(&provider->lock);
    free(provider);
    return UMF_RESULT_SUCCESS;
}

static umf_result_t allocate(void *self, size_t size, size_t alignment, void **address) {
    struct provider *provider = self;
    highwater_buffer *buffer = NULL;
    highwater_status status = highwater_device_allocate_shared(provider->device, size, &buffer);
    if (status != HIGHWATER_OK) {
        return result_of(status);
    }
    umf_result_t result = keep(provider, buffer, address);
    if (result == UMF_RESULT_SUCCESS && alignment && (uintptr_t)*address % alignment != 0) {
        release(provider, *address);
        return UMF_RESULT_ERROR_INVALID_ALIGNMENT;
    }
    return result;
}

/* Does not wait for device work that Highwater enqueued. UMF's caller answers for other work, as for cudaFree. */
static umf_result_t deallocate(void *self, void *address, size_t size) {
    (void)size;
    return address ? release(self, address) : UMF_RESULT_SUCCESS;
}

static umf_result_t last_error(void *self, const char **message, int32_t *status) {
    (void)self;
    if (message) {
        *message = highwater_last_error();
    }
    if (status) {
        *status = last_status;
    }
    return UMF_RESULT_SUCCESS;
}

static umf_result_t recommended_page_size(void *self, size_t size, size_t *bytes) {
    (void)self;
    (void)size;
    *bytes = page;
    return UMF_RESULT_SUCCESS;
}

static umf_result_t min_page_size(void *self, const void *address, size_t *bytes) {
    (void)self;
    (void)address;
    *bytes = page;
    return UMF_RESULT_SUCCESS;
}

static umf_result_t name(void *self, const char **text) {
    (void)self;
    *text = "highwater";
    return UMF_RESULT_SUCCESS;
}

static umf_result_t cache_line_size(void *self, size_t *bytes) {
    (void)self;
    *bytes = 128;
    return UMF_RESULT_SUCCESS;
}

static umf_result_t ipc_handle_size(void *self, size_t *bytes) {
    (void)self;
    *bytes = TICKET_BYTES;
    return UMF_RESULT_SUCCESS;
}

static umf_result_t get_ipc_handle(void *self, const void *address, size_t size, void *handle) {
    highwater_buffer *buffer = find(self, address, false);
    char *ticket = NULL;
    (void)size;
    if (!buffer) {
        return UMF_RESULT_ERROR_INVALID_ARGUMENT;
    }
    highwater_status status = highwater_buffer_share(buffer, &ticket);
    if (status != HIGHWATER_OK) {
        return result_of(status);
    }
    size_t bytes = strlen(ticket) + 1;
    if (bytes <= TICKET_BYTES) {
        memcpy(handle, ticket, bytes);
    }
    highwater_text_release(&ticket);
    return bytes <= TICKET_BYTES ? UMF_RESULT_SUCCESS : UMF_RESULT_ERROR_NOT_SUPPORTED;
}

/* A ticket keeps nothing alive. It ends with its buffer. */
static umf_result_t put_ipc_handle(void *self, void *handle) {
    (void)self;
    (void)handle;
    return UMF_RESULT_SUCCESS;
}

static umf_result_t open_ipc_handle(void *self, void *handle, void **address) {
    struct provider *provider = self;
    highwater_buffer *buffer = NULL;
    if (!memchr(handle, 0, TICKET_BYTES)) {
        return UMF_RESULT_ERROR_INVALID_ARGUMENT;
    }
    highwater_status status = highwater_ticket_open(provider->runtime, handle, HIGHWATER_OWNER_DEATH_KEEP, &buffer);
    return status == HIGHWATER_OK ? keep(provider, buffer, address) : result_of(status);
}

static umf_result_t close_ipc_handle(void *self, void *address, size_t size) {
    (void)size;
    return release(self, address);
}

const umf_memory_provider_ops_t *highwater_provider_ops(void) {
    static const umf_memory_provider_ops_t ops = {
        .version = UMF_PROVIDER_OPS_VERSION_CURRENT,
        .initialize = initialize,
        .finalize = finalize,
        .alloc = allocate,
        .free = deallocate,
        .get_last_native_error = last_error,
        .get_recommended_page_size = recommended_page_size,
        .get_min_page_size = min_page_size,
        .get_name = name,
        .ext_get_ipc_handle_size = ipc_handle_size,
        .ext_get_ipc_handle = get_ipc_handle,
        .ext_put_ipc_handle = put_ipc_handle,
        .ext_open_ipc_handle = open_ipc_handle,
        .ext_close_ipc_handle = close_ipc_handle,
        .get_cache_line_size = cache_line_size,
    };
    return &ops;
}
