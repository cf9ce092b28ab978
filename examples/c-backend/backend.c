/* A backend of Highwater in C: the CPU as the device, its memory as device memory. docs/write-a-backend.md explains it.
 *
 * It has the groups required, host and blas; every other slot is null. Each stream has a thread that executes its
 * queue: calls that enqueue may not wait (stream.asynchronous), and streams may not wait for each other
 * (stream.independent). Everything else happens at once, in the calling thread. One lock guards all but the bytes of
 * blocks, and nobody holds it while working on bytes. Nothing here looks for forks and for the end of the process:
 * the program calls nothing in either. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "highwater.h"

#pragma GCC diagnostic ignored "-Wunused-parameter" /* slots have the parameters that the table gives them */

#define TABLE_VERSION 1u /* what this file was written for, whatever the header knows by now */
#define DEVICE_BYTES (UINT64_C(256) << 20)
#define ALIGNMENT 256u      /* memory.aligned, host.aligned */
#define MOST_OBJECTS 65536u /* streams and events */

/* ---- objects */
/* A point in a stream: reached once so much was executed, whatever becomes of ids. Without a stream: no record yet. */
struct point { const struct object *stream; uint64_t enqueued; };

struct work {
    struct work *next;
    enum { COPY, FILL, PRODUCT, WAIT } kind;
    union { hw_memory_copy copy; hw_memory_fill fill; hw_gemm product; struct point point; } as;
};
/* What an id leads to. It stays where it is until `close`, for one stream or event after the other. */
struct object {
    enum { NOTHING, STREAM, EVENT } kind; /* what is alive here */
    uint32_t number, generation;          /* generation of the latest */
    struct point point;                   /* for events: of the latest record */
    hw_backend *backend;                  /* for streams, as what follows; null where there is no thread */
    pthread_t thread;                     /* kept for the next stream that gets the place */
    struct work *first, **end;
    uint64_t enqueued, executed; /* ever */
};

struct blocks { uint64_t count, bytes, most_bytes; };
struct block { struct blocks *of; uint64_t bytes; void *start; }; /* right in front of the bytes */
struct hw_backend {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* something was enqueued or executed, or the backend is closed */
    uint32_t tag;
    int closing;
    struct object *objects[MOST_OBJECTS]; /* null from the first one on that was never used */
    struct blocks device, host;
    hw_live_objects live;
};
struct hw_handle { hw_backend *backend; hw_id stream; }; /* null: destroyed; zeros: bound to none */
static hw_log_call log_line;

/* ---- errors and structs */
#define CHECK(call) do { int32_t code_ = (call); if (code_ != HW_OK) return code_; } while (0)

/* Says what was wrong and what to do about it, and gives the code back. */
__attribute__((format(printf, 4, 5)))
static int32_t fail(hw_error *e, int32_t code, const char *hint, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e->message, sizeof e->message, format, arguments);
    va_end(arguments);
    snprintf(e->hint, sizeof e->hint, "%s", hint);
    return code;
}

static int32_t invalid(hw_error *e, const char *what, uint64_t value) {
    return fail(e, HW_ERROR_INVALID_ARGUMENT, "see highwater.h", "%" PRIu64 " is no %s", value, what);
}
static int32_t lacks(hw_error *e, const char *what) {
    return fail(e, HW_ERROR_UNSUPPORTED, "ask for the capabilities first", "the device has no %s", what);
}
static int32_t out_of_memory(hw_error *e) {
    return fail(e, HW_ERROR_OUT_OF_MEMORY, "free what is not used", "there is no room left for that");
}
/* Of every choice this device has the one with the number 0. */
static int32_t none_but_0(uint32_t choice, const char *what, hw_error *e) {
    return choice == 0 ? HW_OK : lacks(e, what);
}
static int32_t check_device(uint32_t device, hw_error *e) {
    return device == 0 ? HW_OK : invalid(e, "device; there is device 0 only", device);
}

/* Reads a struct of the program: a shorter one means zeros for the rest, a longer one has to be zero there. */
static int32_t take(void *known, uint64_t bytes, const void *given, hw_error *e) {
    uint64_t size = *(const uint64_t *)given;
    for (uint64_t byte = bytes; byte < size; byte++)
        if (((const unsigned char *)given)[byte] != 0)
            return invalid(e, "place in a struct that this plugin knows", byte);
    memset(known, 0, bytes);
    memcpy(known, given, size < bytes ? size : bytes);
    return HW_OK;
}
/* Writes a struct for the program, as far as it has room, and says how much that was. */
static int32_t give(void *answer, const void *value, uint64_t bytes) {
    uint64_t room = *(const uint64_t *)answer, written = room < bytes ? room : bytes;
    memcpy(answer, value, written);
    memcpy(answer, &written, sizeof written);
    return HW_OK;
}

/* ---- ids, with the lock */
static int has_work(const struct object *stream) { return stream->executed < stream->enqueued; }
static int32_t leave(hw_backend *b, int32_t code) { return pthread_mutex_unlock(&b->lock), code; }

/* Finds the object of an id. A stale, foreign or forged id differs from it in a number (backend.ids-checked). */
static int32_t find(hw_backend *b, int kind, hw_id id, struct object **found, hw_error *e) {
    int own = id.tag == b->tag && id.device == 0;
    *found = own && id.slot < MOST_OBJECTS ? b->objects[id.slot] : NULL;
    if (*found != NULL && (int)(*found)->kind == kind && (*found)->generation == id.generation)
        return HW_OK;
    if (own && id.slot >= HW_FIRST_NAMED_SLOT && id.generation == 1)
        return lacks(e, "default streams");
    return fail(e, HW_ERROR_INVALID_HANDLE, "make a new one", "the id %" PRIu32 ".%" PRIu32 ".%" PRIu32 ".%" PRIu32
                " stands for nothing (any more)", id.slot, id.generation, id.tag, id.device);
}
/* Takes the lock and finds an object, or fails without the lock. */
static int32_t enter(hw_backend *b, int kind, hw_id id, struct object **found, hw_error *e) {
    pthread_mutex_lock(&b->lock);
    int32_t code = find(b, kind, id, found, e);
    return code == HW_OK ? code : leave(b, code);
}

/* A place for an object: one that nobody uses any more, with a thread for streams, or a new one; null without room. */
static struct object *place(hw_backend *b, int kind) {
    for (uint32_t number = 0; number < MOST_OBJECTS; number++) {
        struct object *object = b->objects[number];
        if (object == NULL && (object = b->objects[number] = calloc(1, sizeof *object)) != NULL)
            object->number = number;
        int fits = object != NULL && (object->backend != NULL) == (kind == STREAM) && object->generation < UINT32_MAX;
        if (object == NULL || object->generation == 0 || (fits && object->kind == NOTHING && !has_work(object)))
            return object;
    }
    return NULL;
}

static hw_id issue(const hw_backend *b, struct object *object, int kind, uint64_t *live) {
    object->kind = kind;
    *live += 1;
    return (hw_id){.slot = object->number, .generation = ++object->generation, .tag = b->tag, .device = 0};
}
/* Makes the id stale. Work that is enqueued, and waits for a point, do not need it. */
static int32_t retire(hw_backend *b, int kind, hw_id id, uint64_t *live, hw_error *e) {
    struct object *object;
    CHECK(enter(b, kind, id, &object, e));
    object->kind = NOTHING;
    *live -= 1;
    return leave(b, HW_OK);
}

/* ---- what streams execute */
/* Streams that nobody ordered may meet in device memory. What is there is unspecified then, and nothing worse may
 * happen: so bytes are reached by atomic operations only. */
typedef uint32_t __attribute__((may_alias)) word32;
typedef uint64_t __attribute__((may_alias)) word64;
#define LOAD(type, address) __atomic_load_n((const type *)(uintptr_t)(address), __ATOMIC_RELAXED)
#define STORE(type, address, value) __atomic_store_n((type *)(uintptr_t)(address), (type)(value), __ATOMIC_RELAXED)

static void copy_bytes(uint64_t to, uint64_t from, uint64_t bytes) {
    for (; bytes >= 8 && (to | from) % 8 == 0; to += 8, from += 8, bytes -= 8)
        STORE(word64, to, LOAD(word64, from));
    for (; bytes > 0; to++, from++, bytes--)
        STORE(unsigned char, to, LOAD(unsigned char, from));
}
static void fill_bytes(const hw_memory_fill *fill) {
    for (uint64_t byte = 0; byte < fill->count * fill->pattern_bytes; byte++)
        STORE(unsigned char, fill->dst + byte, fill->pattern >> byte % fill->pattern_bytes * 8);
}
static double load(uint32_t type, uint64_t matrix, uint64_t index) {
    if (type == HW_DATA_TYPE_F64)
        return (union { uint64_t bits; double value; }){LOAD(word64, matrix + 8 * index)}.value;
    return (union { uint32_t bits; float value; }){LOAD(word32, matrix + 4 * index)}.value;
}
static void store(uint32_t type, uint64_t matrix, uint64_t index, double value) {
    if (type == HW_DATA_TYPE_F64)
        STORE(word64, matrix + 8 * index, (union { double value; uint64_t bits; }){value}.bits);
    else
        STORE(word32, matrix + 4 * index, (union { float value; uint32_t bits; }){(float)value}.bits);
}

/* What a factor of 0 hides is not read (gemm.alpha-zero, gemm.beta-zero). */
static void multiply(const hw_gemm *gemm) {
    const hw_gemm_shape *shape = &gemm->shape;
    uint64_t products = shape->has_batch ? shape->batch_count : 1;
    for (uint64_t element = 0; element < products * shape->n * shape->m; element++) {
        uint64_t row = element % shape->m, column = element / shape->m % shape->n;
        uint64_t product = element / shape->m / shape->n, c = product * shape->stride_c + row + column * shape->ldc;
        double sum = 0, old = gemm->beta == 0 ? 0 : gemm->beta * load(shape->output, gemm->c, c);
        for (uint64_t inner = 0; gemm->alpha != 0 && inner < shape->k; inner++) {
            uint64_t in_a = shape->transpose_a ? inner + row * shape->lda : row + inner * shape->lda;
            uint64_t in_b = shape->transpose_b ? column + inner * shape->ldb : inner + column * shape->ldb;
            sum += load(shape->data_type, gemm->a, product * shape->stride_a + in_a) *
                   load(shape->data_type, gemm->b, product * shape->stride_b + in_b);
        }
        store(shape->output, gemm->c, c, (shape->k == 0 ? 0 : gemm->alpha * sum) + old);
    }
}

static int is_reached(struct point at) { return at.stream == NULL || at.stream->executed >= at.enqueued; }
/* Waits for a point, with the lock, by which this thread then sees the effects of what was executed. */
static int32_t await(hw_backend *b, struct point point) {
    while (!is_reached(point))
        pthread_cond_wait(&b->changed, &b->lock);
    return HW_OK;
}

/* The thread of a stream, which finishes the queue also of one that was destroyed (stream.destroy-pending). */
static void *serve(void *argument) {
    struct object *stream = argument;
    hw_backend *b = stream->backend;
    pthread_mutex_lock(&b->lock);
    while (stream->first != NULL || !b->closing) {
        struct work *work = stream->first;
        if (work == NULL || (work->kind == WAIT && !is_reached(work->as.point))) {
            pthread_cond_wait(&b->changed, &b->lock);
            continue;
        }
        pthread_mutex_unlock(&b->lock);
        switch (work->kind) {
        case COPY: copy_bytes(work->as.copy.dst.address, work->as.copy.src.address, work->as.copy.bytes); break;
        case FILL: fill_bytes(&work->as.fill); break;
        case PRODUCT: multiply(&work->as.product); break;
        case WAIT: break;
        }
        pthread_mutex_lock(&b->lock);
        if ((stream->first = work->next) == NULL)
            stream->end = &stream->first;
        free(work);
        stream->executed++;
        pthread_cond_broadcast(&b->changed);
    }
    leave(b, HW_OK);
    return NULL;
}

/* Enqueues, with the lock. */
static int32_t append(struct object *stream, const struct work *work, hw_error *e) {
    struct work *appended = malloc(sizeof *appended);
    if (appended == NULL)
        return out_of_memory(e);
    *appended = *work;
    *stream->end = appended;
    stream->end = &appended->next;
    stream->enqueued++;
    pthread_cond_broadcast(&stream->backend->changed);
    return HW_OK;
}
/* Enqueues, or only checks the stream where there is nothing to do (copy.zero, fill.zero, gemm.empty). */
static int32_t enqueue(hw_backend *b, hw_id id, const struct work *work, int something, hw_error *e) {
    struct object *stream;
    CHECK(enter(b, STREAM, id, &stream, e));
    return leave(b, something ? append(stream, work, e) : HW_OK);
}

/* ---- group required: the device */
static int32_t identity(hw_backend *b, hw_identity *answer, hw_error *e) {
    hw_identity value = {.name = "c", .description = "The CPU, in C", .versions = "c\t0.1.0"};
    return give(answer, &value, sizeof value);
}
static int32_t device_count(hw_backend *b, uint32_t *answer, hw_error *e) {
    *answer = 1;
    return HW_OK;
}
static int32_t device_info(hw_backend *b, uint32_t device, hw_device_info *answer, hw_error *e) {
    hw_device_info value = {.memory_bytes = DEVICE_BYTES, .uuid = "c-backend device", .name = "CPU in C"};
    CHECK(check_device(device, e));
    return give(answer, &value, sizeof value);
}
static int32_t capabilities(hw_backend *b, uint32_t device, hw_capabilities *answer, hw_error *e) {
    hw_capabilities value = {.facts = HW_FACT_HOST_ADDRESS_IS_DEVICE_ADDRESS, .workspace_alignment = ALIGNMENT};
    value.abilities = HW_CAN_GEMM_F32 | HW_CAN_GEMM_F64 | HW_CAN_STRIDED_BATCH;
    CHECK(check_device(device, e));
    return give(answer, &value, sizeof value);
}
static int32_t memory_info(hw_backend *b, uint32_t device, hw_memory_info *answer, hw_error *e) {
    CHECK(check_device(device, e));
    pthread_mutex_lock(&b->lock);
    hw_memory_info value = {.free = DEVICE_BYTES - b->device.bytes, .total = DEVICE_BYTES};
    return leave(b, give(answer, &value, sizeof value));
}
static int32_t live_objects(hw_backend *b, hw_live_objects *answer, hw_error *e) {
    pthread_mutex_lock(&b->lock);
    b->live.allocations = b->device.count;
    b->live.host_allocations = b->host.count;
    return leave(b, give(answer, &b->live, sizeof b->live));
}
/* No vendor's library goes away here before the process does; that the process exits, the program notices itself. */
static int32_t is_exiting(hw_backend *b, uint32_t *answer, hw_error *e) {
    *answer = 0;
    return HW_OK;
}

/* ---- group required: streams */
/* Gives an object a thread, which takes no signals: those are the program's. */
static int32_t start(hw_backend *b, struct object *stream, hw_error *e) {
    sigset_t every, before;
    stream->end = &stream->first;
    stream->backend = b;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    int failed = pthread_create(&stream->thread, NULL, serve, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed == 0)
        return HW_OK;
    stream->backend = NULL;
    return fail(e, HW_ERROR_OPERATING_SYSTEM, "end some threads", "no thread for a stream: error %d", failed);
}
static int32_t create_stream(hw_backend *b, uint32_t device, const hw_stream_options *given, hw_id *id, hw_error *e) {
    hw_stream_options options;
    CHECK(check_device(device, e));
    CHECK(take(&options, sizeof options, given, e));
    CHECK(none_but_0(options.priority, "such priority", e));
    pthread_mutex_lock(&b->lock);
    struct object *stream = place(b, STREAM);
    int32_t code = stream == NULL ? out_of_memory(e) : stream->backend != NULL ? HW_OK : start(b, stream, e);
    if (code == HW_OK)
        *id = issue(b, stream, STREAM, &b->live.streams);
    return leave(b, code);
}
static int32_t destroy_stream(hw_backend *b, hw_id id, hw_error *e) {
    return retire(b, STREAM, id, &b->live.streams, e);
}
static int32_t query_stream(hw_backend *b, hw_id id, uint32_t *answer, hw_error *e) {
    struct object *stream;
    CHECK(enter(b, STREAM, id, &stream, e));
    *answer = has_work(stream) ? HW_PENDING : HW_COMPLETE;
    return leave(b, HW_OK);
}
static int32_t synchronize_stream(hw_backend *b, hw_id id, hw_error *e) {
    struct object *stream;
    CHECK(enter(b, STREAM, id, &stream, e));
    return leave(b, await(b, (struct point){stream, stream->enqueued}));
}
/* Streams that were destroyed and have work left are the device's too. */
static int32_t synchronize_device(hw_backend *b, uint32_t device, hw_error *e) {
    CHECK(check_device(device, e));
    pthread_mutex_lock(&b->lock);
    for (uint32_t number = 0; number < MOST_OBJECTS && b->objects[number] != NULL; number++)
        await(b, (struct point){b->objects[number], b->objects[number]->enqueued});
    return leave(b, HW_OK);
}

/* ---- group required: events */
static int32_t create_event(hw_backend *b, uint32_t device, const hw_event_options *given, hw_id *id, hw_error *e) {
    hw_event_options options;
    CHECK(check_device(device, e));
    CHECK(take(&options, sizeof options, given, e));
    if (options.timing != 0 && options.interprocess != 0)
        return invalid(e, "timing of an event for other processes", options.timing);
    CHECK(none_but_0(options.timing | options.interprocess, "such event", e));
    pthread_mutex_lock(&b->lock);
    struct object *event = place(b, EVENT);
    if (event == NULL)
        return leave(b, out_of_memory(e));
    event->point.stream = NULL;
    *id = issue(b, event, EVENT, &b->live.events);
    return leave(b, HW_OK);
}
static int32_t destroy_event(hw_backend *b, hw_id id, hw_error *e) {
    return retire(b, EVENT, id, &b->live.events, e);
}
static int32_t record_event(hw_backend *b, hw_id id, hw_id on, hw_error *e) {
    struct object *event, *stream;
    CHECK(enter(b, EVENT, id, &event, e));
    int32_t code = find(b, STREAM, on, &stream, e);
    if (code == HW_OK)
        event->point = (struct point){stream, stream->enqueued};
    return leave(b, code);
}
/* The wait is for the point of now, wherever the event moves (event.wait-snapshot). */
static int32_t stream_wait_event(hw_backend *b, hw_id on, hw_id id, hw_error *e) {
    struct object *event, *stream;
    CHECK(enter(b, EVENT, id, &event, e));
    int32_t code = find(b, STREAM, on, &stream, e);
    if (code == HW_OK && !is_reached(event->point))
        code = append(stream, &(struct work){.kind = WAIT, .as.point = event->point}, e);
    return leave(b, code);
}
static int32_t query_event(hw_backend *b, hw_id id, uint32_t *answer, hw_error *e) {
    struct object *event;
    CHECK(enter(b, EVENT, id, &event, e));
    *answer = is_reached(event->point) ? HW_COMPLETE : HW_PENDING;
    return leave(b, HW_OK);
}
static int32_t synchronize_event(hw_backend *b, hw_id id, hw_error *e) {
    struct object *event;
    CHECK(enter(b, EVENT, id, &event, e));
    return leave(b, await(b, event->point));
}

/* ---- groups required and host: memory, copies, fills */
/* Zeroed: the program makes slices of host memory, so that has to be initialized (host.usable). */
static int32_t add_block(hw_backend *b, struct blocks *to, uint64_t bytes, uint64_t *answer, hw_error *e) {
    if (bytes == 0)
        return invalid(e, "size of a block", bytes);
    pthread_mutex_lock(&b->lock);
    void *start = bytes <= to->most_bytes - to->bytes ? calloc(1, bytes + 2 * ALIGNMENT) : NULL;
    if (start == NULL)
        return leave(b, out_of_memory(e));
    *answer = ((uint64_t)(uintptr_t)start / ALIGNMENT + 2) * ALIGNMENT;
    ((struct block *)(uintptr_t)*answer)[-1] = (struct block){to, bytes, start};
    to->bytes += bytes;
    to->count++;
    return leave(b, HW_OK);
}
static int32_t drop_block(hw_backend *b, struct blocks *from, uint64_t address, hw_error *e) {
    struct block *block = (struct block *)(uintptr_t)address - 1;
    if (address % ALIGNMENT != 0 || block->of != from)
        return fail(e, HW_ERROR_INVALID_POINTER, "free blocks once", "no block begins at %#" PRIx64, address);
    pthread_mutex_lock(&b->lock);
    from->bytes -= block->bytes;
    from->count--;
    block->of = NULL;
    free(block->start);
    return leave(b, HW_OK);
}
static int32_t allocate(hw_backend *b, uint32_t device, const hw_allocate_options *given, uint64_t *ptr, hw_error *e) {
    hw_allocate_options options;
    CHECK(check_device(device, e));
    CHECK(take(&options, sizeof options, given, e));
    CHECK(none_but_0(options.kind, "such memory", e));
    return add_block(b, &b->device, options.bytes, ptr, e);
}
static int32_t free_memory(hw_backend *b, uint32_t device, uint64_t ptr, hw_id stream, hw_error *e) {
    CHECK(check_device(device, e));
    return drop_block(b, &b->device, ptr, e);
}
static int32_t host_allocate(hw_backend *b, uint64_t bytes, const hw_host_options *given, void **answer, hw_error *e) {
    hw_host_options options;
    uint64_t address;
    CHECK(take(&options, sizeof options, given, e));
    CHECK(none_but_0(options.kind, "such memory", e));
    CHECK(add_block(b, &b->host, bytes, &address, e));
    *answer = (void *)(uintptr_t)address;
    return HW_OK;
}
static int32_t host_free(hw_backend *b, void *ptr, hw_error *e) {
    return drop_block(b, &b->host, (uint64_t)(uintptr_t)ptr, e);
}
static int32_t host_device_address(hw_backend *b, void *ptr, uint32_t device, uint64_t *answer, hw_error *e) {
    CHECK(check_device(device, e));
    *answer = (uint64_t)(uintptr_t)ptr;
    return HW_OK;
}
static int32_t copy(hw_backend *b, const hw_memory_copy *given, hw_id stream, hw_error *e) {
    struct work work = {.kind = COPY};
    CHECK(take(&work.as.copy, sizeof work.as.copy, given, e));
    CHECK(check_device(work.as.copy.dst.device | work.as.copy.src.device, e));
    return enqueue(b, stream, &work, work.as.copy.bytes != 0, e);
}
static int32_t fill(hw_backend *b, const hw_memory_fill *given, hw_id stream, hw_error *e) {
    struct work work = {.kind = FILL};
    CHECK(take(&work.as.fill, sizeof work.as.fill, given, e));
    CHECK(check_device(work.as.fill.device, e));
    if (work.as.fill.pattern_bytes > sizeof work.as.fill.pattern)
        return invalid(e, "size of an element", work.as.fill.pattern_bytes);
    return enqueue(b, stream, &work, work.as.fill.count != 0, e);
}

/* ---- group blas */
static int32_t create_handle(hw_backend *b, uint32_t device, uint32_t kind, hw_handle **answer, hw_error *e) {
    CHECK(check_device(device, e));
    CHECK(none_but_0(kind, "such handle", e));
    hw_handle *handle = calloc(1, sizeof *handle);
    if (handle == NULL)
        return out_of_memory(e);
    (*answer = handle)->backend = b;
    pthread_mutex_lock(&b->lock);
    b->live.handles++;
    return leave(b, HW_OK);
}
static int32_t check_handle(const hw_handle *handle, hw_error *e) {
    return handle->backend ? HW_OK : fail(e, HW_ERROR_INVALID_HANDLE, "make another", "the handle was destroyed");
}
static int32_t handle_set_stream(hw_handle *handle, hw_id stream, hw_error *e) {
    CHECK(check_handle(handle, e));
    CHECK(enqueue(handle->backend, stream, NULL, 0, e));
    handle->stream = stream;
    return HW_OK;
}
static int32_t handle_set_workspace(hw_handle *handle, const hw_workspace *given, hw_error *e) {
    hw_workspace workspace;
    CHECK(check_handle(handle, e));
    CHECK(take(&workspace, sizeof workspace, given, e));
    return none_but_0(workspace.present, "workspace for handles", e);
}
static int32_t handle_set_math_mode(hw_handle *handle, uint32_t mode, hw_error *e) {
    CHECK(check_handle(handle, e));
    return none_but_0(mode, "such math mode", e);
}
static int32_t handle_set_atomics_mode(hw_handle *handle, uint32_t mode, hw_error *e) {
    CHECK(check_handle(handle, e));
    return none_but_0(mode, "such atomics mode", e);
}
/* What is in the shape besides its types was checked by the program. */
static int32_t handle_gemm(hw_handle *handle, const hw_gemm *given, hw_error *e) {
    struct work work = {.kind = PRODUCT};
    const hw_gemm_shape *shape = &work.as.product.shape;
    CHECK(check_handle(handle, e));
    CHECK(take(&work.as.product, sizeof work.as.product, given, e));
    if (shape->data_type > HW_DATA_TYPE_F64 || shape->output != shape->data_type)
        return lacks(e, "products of such types");
    if (handle->stream.tag == 0)
        return fail(e, HW_ERROR_INVALID_STATE, "bind a stream first", "the handle is bound to no stream");
    int something = shape->m != 0 && shape->n != 0 && (!shape->has_batch || shape->batch_count != 0);
    return enqueue(handle->backend, handle->stream, &work, something, e);
}
static int32_t handle_raw(hw_handle *handle, uint64_t *answer, hw_error *e) {
    CHECK(check_handle(handle, e));
    *answer = (uint64_t)(uintptr_t)handle;
    return HW_OK;
}
static int32_t handle_destroy(hw_handle *handle, hw_error *e) {
    CHECK(check_handle(handle, e));
    hw_backend *b = handle->backend;
    handle->backend = NULL;
    pthread_mutex_lock(&b->lock);
    b->live.handles--;
    return leave(b, HW_OK);
}
static int32_t handle_close(hw_handle *handle, hw_error *e) {
    handle_destroy(handle, e); /* unless it was */
    free(handle);
    return HW_OK;
}

/* ---- opening, closing, the table */
static int32_t open_backend(const hw_open *given, hw_backend **answer, hw_error *e) {
    hw_open request;
    CHECK(take(&request, sizeof request, given, e));
    if (request.version != TABLE_VERSION || request.tag == 0)
        return invalid(e, "version of the table, or the tag is 0", request.version);
    hw_backend *b = calloc(1, sizeof *b);
    if (b == NULL)
        return out_of_memory(e);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    (*answer = b)->tag = request.tag;
    b->device.most_bytes = DEVICE_BYTES;
    b->host.most_bytes = SIZE_MAX / 2;
    return HW_OK;
}

/* Nobody uses the backend any more, but its threads may have work left. */
static int32_t close_backend(hw_backend *b, hw_error *e) {
    pthread_mutex_lock(&b->lock);
    b->closing = 1;
    pthread_cond_broadcast(&b->changed);
    leave(b, HW_OK);
    for (uint32_t number = 0; number < MOST_OBJECTS && b->objects[number] != NULL; number++)
        if (b->objects[number]->backend != NULL)
            pthread_join(b->objects[number]->thread, NULL);
    for (uint32_t number = 0; number < MOST_OBJECTS; number++)
        free(b->objects[number]);
    if (log_line != NULL && b->device.count + b->host.count != 0)
        log_line(HW_LOG_WARN, "memory was not given back", 25);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_destroy(&b->lock);
    free(b);
    return HW_OK;
}

static const hw_table *table_of(uint32_t version) {
    static const hw_table table = {
        .size = sizeof table, .close = close_backend, .identity = identity, .device_count = device_count,
        .device_info = device_info, .capabilities = capabilities, .memory_info = memory_info,
        .live_objects = live_objects, .is_exiting = is_exiting, .create_stream = create_stream,
        .destroy_stream = destroy_stream, .query_stream = query_stream, .synchronize_stream = synchronize_stream,
        .synchronize_device = synchronize_device, .stream_wait_event = stream_wait_event,
        .create_event = create_event, .destroy_event = destroy_event, .record_event = record_event,
        .query_event = query_event, .synchronize_event = synchronize_event, .allocate = allocate,
        .free = free_memory, .copy = copy, .fill = fill, .host_allocate = host_allocate, .host_free = host_free,
        .host_device_address = host_device_address, .create_handle = create_handle,
        .handle_set_stream = handle_set_stream, .handle_set_workspace = handle_set_workspace,
        .handle_set_math_mode = handle_set_math_mode, .handle_set_atomics_mode = handle_set_atomics_mode,
        .handle_gemm = handle_gemm, .handle_raw = handle_raw, .handle_destroy = handle_destroy,
        .handle_close = handle_close,
    };
    return version == TABLE_VERSION ? &table : NULL;
}

const hw_plugin *highwater_plugin(const hw_host *host) {
    static const hw_plugin plugin = {
        .size = sizeof plugin, .version_min = TABLE_VERSION, .version_max = TABLE_VERSION,
        .name = "c", .description = "The CPU, in C", .vendor = "Highwater's examples", .version = "0.1.0",
        .open = open_backend, .table = table_of,
    };
    log_line = host->log;
    return &plugin;
}
