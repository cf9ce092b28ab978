/* highwater.h: Highwater as a C library. C11 and C++17.
 *
 * Generated from the code of highwater-c by cbindgen; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Status. Every function that returns highwater_status returns HIGHWATER_OK, or HIGHWATER_ERROR_... . Then highwater_last_error
 * returns a message with the fault, the expected value and the remedy. An answer is written only with HIGHWATER_OK, unless the
 * function's comment says otherwise.
 *
 * Handles. A function that makes a handle writes it to the address in its last argument. A function ..._release takes the address of
 * the handle and sets it to null. Releasing null does nothing. Handles can be released in any order: an object keeps what it needs.
 * A handle of another kind is refused, and so is a released one as far as its memory shows. A release of memory, an event or a graph
 * does not wait, with one exception: the release of the last object of a runtime ends the runtime, and waits for its devices.
 *
 * Threads. Any thread may use any handle, and several may use one handle at once, except a per-thread default stream. No thread may use
 * a handle during or after its release. The program orders accesses to the same memory: by one stream, by events, or by
 * highwater_pinned_wait.
 *
 * Structs. A struct begins with its size, which the caller sets to sizeof. Set all other fields to zero first:
 * `highwater_gemm gemm = {.size = sizeof gemm};`. Zero is the default of each field. A size below that of the struct's first version
 * returns HIGHWATER_ERROR_INVALID_ARGUMENT, for example the sizeof of a pointer to the struct.
 *
 * Fork. In a forked child, every call with a handle of the parent returns HIGHWATER_ERROR_FORKED, and a release does nothing. Open no
 * runtime in the child: call exec, and open it in the new program.
 *
 * Callbacks. No exception and no longjmp may leave a callback. A callback runs in the thread of the call that has it as an argument, if its
 * comment names no other. A highwater_end_callback may run in any thread, and must call no function of this library.
 *
 * Allocators. highwater_torch_... and highwater_pinned_malloc and _free have no runtime among their arguments. The first call
 * opens one, over the backend that HIGHWATER_BACKEND names, else over the best real device. It lives as long as the process. After an error
 * they return null, or do nothing, and highwater_last_error returns the message.
 */

#ifndef HIGHWATER_HIGHWATER_H
#define HIGHWATER_HIGHWATER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Success.
 */
#define HIGHWATER_OK 0

/**
 * A panic was contained: an error in Highwater itself.
 */
#define HIGHWATER_PANICKED -1

/**
 * The function does not accept an argument.
 */
#define HIGHWATER_ERROR_INVALID_ARGUMENT 1

/**
 * A handle is released, of another kind, or no handle.
 */
#define HIGHWATER_ERROR_INVALID_HANDLE 2

/**
 * An address is not from this runtime, was freed, or points into the middle of a block.
 */
#define HIGHWATER_ERROR_INVALID_POINTER 3

/**
 * Objects of different devices were mixed in one call.
 */
#define HIGHWATER_ERROR_WRONG_DEVICE 4

/**
 * The device lacks the capability, or this version does not support it.
 */
#define HIGHWATER_ERROR_UNSUPPORTED 5

/**
 * Memory of the device or the host is exhausted.
 */
#define HIGHWATER_ERROR_OUT_OF_MEMORY 6

/**
 * A library of the vendor could not be opened.
 */
#define HIGHWATER_ERROR_LIBRARY_MISSING 7

/**
 * A library of the vendor lacks a required symbol.
 */
#define HIGHWATER_ERROR_SYMBOL_MISSING 8

/**
 * The library works, but there is no usable device.
 */
#define HIGHWATER_ERROR_DEVICE_MISSING 9

/**
 * No backend of that name is known.
 */
#define HIGHWATER_ERROR_UNKNOWN_BACKEND 10

/**
 * A capture was refused or lost.
 */
#define HIGHWATER_ERROR_CAPTURE 11

/**
 * The object is in a state that forbids this call now.
 */
#define HIGHWATER_ERROR_INVALID_STATE 12

/**
 * A device error from which no call recovers. The process must end.
 */
#define HIGHWATER_ERROR_DEVICE_LOST 13

/**
 * The process is exiting, or the runtime has ended.
 */
#define HIGHWATER_ERROR_SHUTTING_DOWN 14

/**
 * The process was forked after the runtime was opened; the child cannot use it.
 */
#define HIGHWATER_ERROR_FORKED 15

/**
 * The process at the other end of a share has ended.
 */
#define HIGHWATER_ERROR_PEER_LOST 16

/**
 * The memory of a ticket is no longer shared: its owner has freed it or has ended.
 */
#define HIGHWATER_ERROR_EXPIRED 17

/**
 * A call of the operating system failed; the code is its errno.
 */
#define HIGHWATER_ERROR_OPERATING_SYSTEM 18

/**
 * The operating system or the driver refused permission.
 */
#define HIGHWATER_ERROR_PERMISSION_DENIED 19

/**
 * Any other error of the vendor; the vendor's code says which.
 */
#define HIGHWATER_ERROR_VENDOR 20

/**
 * A forbidden call of the capturing thread loses the capture.
 */
#define HIGHWATER_CAPTURE_THREAD_LOCAL 0

/**
 * A forbidden call of any thread loses the capture.
 */
#define HIGHWATER_CAPTURE_GLOBAL 1

/**
 * No call is forbidden.
 */
#define HIGHWATER_CAPTURE_RELAXED 2

/**
 * 32-bit floating point.
 */
#define HIGHWATER_DATA_TYPE_F32 0

/**
 * 64-bit floating point.
 */
#define HIGHWATER_DATA_TYPE_F64 1

/**
 * 16-bit floating point, IEEE 754 binary16.
 */
#define HIGHWATER_DATA_TYPE_F16 2

/**
 * 16-bit floating point with the exponent of 32 bits, bfloat16.
 */
#define HIGHWATER_DATA_TYPE_BF16 3

/**
 * The memory stays until the buffer is released.
 */
#define HIGHWATER_OWNER_DEATH_KEEP 0

/**
 * The memory is released at once. Later calls on the buffer return HIGHWATER_ERROR_EXPIRED.
 */
#define HIGHWATER_OWNER_DEATH_RELEASE 1

/**
 * This process becomes the owner: the memory stays, and the process answers its tickets.
 */
#define HIGHWATER_OWNER_DEATH_INHERIT 2

/**
 * Memory of a device.
 */
typedef struct highwater_buffer highwater_buffer;

/**
 * A callback that waits for the death of a process.
 */
typedef struct highwater_death_watch highwater_death_watch;

/**
 * A device of a runtime.
 */
typedef struct highwater_device highwater_device;

/**
 * A point in the work of a stream.
 */
typedef struct highwater_event highwater_event;

/**
 * Work that was recorded, to launch.
 */
typedef struct highwater_graph highwater_graph;

/**
 * The process that owns opened memory. It keeps no memory, and outlives the buffer.
 */
typedef struct highwater_owner highwater_owner;

/**
 * Page-locked memory of the host.
 */
typedef struct highwater_pinned highwater_pinned;

/**
 * A backend, its devices, and the pools of both.
 */
typedef struct highwater_runtime highwater_runtime;

/**
 * Work in order on a device.
 */
typedef struct highwater_stream highwater_stream;

/**
 * HIGHWATER_OK, HIGHWATER_PANICKED, or HIGHWATER_ERROR_...
 */
typedef int32_t highwater_status;

/**
 * Options of highwater_open. Zero is the default of each.
 */
typedef struct highwater_open_options {
    /**
     * sizeof(highwater_open_options).
     */
    size_t size;
    /**
     * If not 0, the mock is opened if no real device works. Has no effect with a backend's name.
     */
    uint32_t fallback_to_mock;
    /**
     * If not 0, no folder is searched for plugins.
     */
    uint32_t no_plugins;
    /**
     * A plugin's library or manifest, which is opened and no other.
     */
    const char *plugin_path;
    /**
     * One more folder that is searched for plugins: an absolute path. A relative one is refused.
     */
    const char *plugin_folder;
    /**
     * Most bytes of pinned memory that the runtime holds; 0 is unlimited.
     */
    uint64_t pinned_cap_bytes;
    /**
     * Most bytes of pinned memory that no buffer owns; 0 is unlimited.
     */
    uint64_t pinned_idle_cap_bytes;
    /**
     * Most bytes of memory of each device that streams hold; 0 is unlimited.
     */
    uint64_t device_cap_bytes;
    /**
     * Bytes of BLAS workspace of each stream; 0 is the backend's choice.
     */
    uint64_t blas_workspace_bytes;
    /**
     * BLAS handles of device 0 that are made in the background.
     */
    uint32_t warm_handles;
    /**
     * If not 0, 32-bit products may use TF32.
     */
    uint32_t allow_tf32;
    /**
     * If not 0, products may differ from run to run.
     */
    uint32_t allow_nondeterminism;
} highwater_open_options;

/**
 * Ends the caller's object that keeps adopted memory, or that a callback uses.
 */
typedef void (*highwater_end_callback)(void *user);

/**
 * The shape of a two-dimensional copy: rows of bytes at equal distances. All fields except `height` are in bytes.
 */
typedef struct highwater_copy_shape {
    /**
     * sizeof(highwater_copy_shape).
     */
    size_t size;
    /**
     * Bytes of each row. With 0, nothing is copied.
     */
    size_t width;
    /**
     * Number of rows. With 0, nothing is copied.
     */
    size_t height;
    /**
     * Bytes from the beginning of one row to that of the next in the source, at least `width`; 0 if the rows are adjacent.
     */
    size_t source_pitch;
    /**
     * The same in the destination.
     */
    size_t destination_pitch;
} highwater_copy_shape;

/**
 * A product C = alpha * op(A) * op(B) + beta * C of column-major matrices. For row-major matrices, exchange A and B, and m and n.
 * Counts are in elements; offsets are in bytes.
 */
typedef struct highwater_gemm {
    /**
     * sizeof(highwater_gemm).
     */
    size_t size;
    /**
     * The type of the elements of A and B: HIGHWATER_DATA_TYPE_...
     */
    uint32_t data_type;
    /**
     * The type of the elements of C: that of A and B, or 32 bits for A and B of 16 bits.
     */
    uint32_t output_type;
    /**
     * If not 0, op(A) is A transposed.
     */
    uint32_t transpose_a;
    /**
     * If not 0, op(B) is B transposed.
     */
    uint32_t transpose_b;
    /**
     * Rows of op(A) and C.
     */
    size_t m;
    /**
     * Columns of op(B) and C.
     */
    size_t n;
    /**
     * Columns of op(A) and rows of op(B).
     */
    size_t k;
    /**
     * Elements from one column of A to the next; 0 if they are adjacent.
     */
    size_t lda;
    /**
     * The same of B.
     */
    size_t ldb;
    /**
     * The same of C.
     */
    size_t ldc;
    /**
     * Number of products of a batch; 0 is one product.
     */
    size_t batch;
    /**
     * Elements from one A of the batch to the next; 0 uses the same A.
     */
    size_t stride_a;
    /**
     * The same of B.
     */
    size_t stride_b;
    /**
     * Elements from one C of the batch to the next.
     */
    size_t stride_c;
    /**
     * The factor of the product. With 0, the default, the product is not computed: set it, for example to 1.
     */
    double alpha;
    /**
     * The factor of the earlier C. With 0, the earlier C is not read.
     */
    double beta;
    /**
     * The memory of A.
     */
    struct highwater_buffer *a;
    /**
     * The memory of B.
     */
    struct highwater_buffer *b;
    /**
     * The memory of C.
     */
    struct highwater_buffer *c;
    /**
     * The first byte of A in its memory: a multiple of the size of an element.
     */
    size_t offset_a;
    /**
     * The same of B.
     */
    size_t offset_b;
    /**
     * The same of C.
     */
    size_t offset_c;
} highwater_gemm;

/**
 * Uses the vendor's handle. The workspace is a device address; it is 0 if the handle uses memory of its own.
 */
typedef void (*highwater_blas_callback)(void *user, uint64_t handle, uint64_t workspace, size_t workspace_bytes);

/**
 * Enqueues the work that is recorded.
 */
typedef highwater_status (*highwater_capture_callback)(void *user);

/**
 * Signals another thread that the owner of memory has died.
 */
typedef void (*highwater_death_callback)(void *user);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the version of the library, such as "0.1.0".
 */
const char *highwater_version(void);

/**
 * Returns the words of a status, such as "out of memory".
 */
const char *highwater_status_text(highwater_status status);

/**
 * Returns the whole message of the last error of this thread: the function, the fault, the expected value and the remedy. It is valid
 * until the next error of this thread, and empty before the first.
 */
const char *highwater_last_error(void);

/**
 * Returns the remedy of the last error of this thread. It may be empty.
 */
const char *highwater_last_hint(void);

/**
 * Writes the vendor's code of the last error of this thread, and returns true. Returns false if there is none.
 */
bool highwater_last_vendor_code(int64_t *code);

/**
 * Frees a text of this library, and sets it to null. Does nothing with null.
 */
void highwater_text_release(char **text);

/**
 * Opens a backend and makes a runtime over it. `backend` is a name, such as "cuda", "rocm", "mock" or a plugin's; that backend is
 * opened or none. If `backend` is null, the variable HIGHWATER_BACKEND names it; without one, the best real device is opened.
 * `options` may be null.
 *
 * If `report` is not null, it receives a JSON text, also after an error of the search. The text states why each backend was or was
 * not taken. Release it with highwater_text_release.
 */
highwater_status highwater_open(const char *backend,
                                const struct highwater_open_options *options,
                                struct highwater_runtime **runtime,
                                char **report);

/**
 * Tries every backend and plugin, and opens none. Writes the report of highwater_open.
 */
highwater_status highwater_survey(char **report);

/**
 * Writes the number of devices.
 */
highwater_status highwater_device_count(struct highwater_runtime *runtime, uint32_t *count);

/**
 * Writes the state and the history of the pools as a JSON text. Release it with highwater_text_release.
 */
highwater_status highwater_statistics(struct highwater_runtime *runtime, char **statistics);

/**
 * Frees what the pools keep and nothing uses.
 */
highwater_status highwater_trim(struct highwater_runtime *runtime);

/**
 * Ends the runtime: waits for its devices and frees everything. Writes the number of objects that the backend still counts to
 * `live`, which may be null. The handle is released, and null afterward, also if the call returns an error.
 * HIGHWATER_ERROR_INVALID_STATE: objects of the runtime are live, or another process has its memory open. The message counts them, and
 * `live` keeps its value. The runtime then ends with the last of its objects. highwater_runtime_release ends it without this check.
 */
highwater_status highwater_close(struct highwater_runtime **runtime,
                                 uint64_t *live);

/**
 * Releases the handle. The runtime ends with the last object that uses it.
 */
highwater_status highwater_runtime_release(struct highwater_runtime **runtime);

/**
 * Makes a handle of the device with an ordinal, from 0.
 */
highwater_status highwater_device_get(struct highwater_runtime *runtime,
                                      uint32_t ordinal,
                                      struct highwater_device **device);

/**
 * Writes the device's name, UUID, memory and capabilities as a JSON text. Release it with highwater_text_release.
 */
highwater_status highwater_device_describe(struct highwater_device *device, char **description);

/**
 * Writes the bytes of free memory and of all memory of the device.
 */
highwater_status highwater_device_memory(struct highwater_device *device, uint64_t *free_bytes, uint64_t *total_bytes);

/**
 * Makes BLAS handles ahead of use.
 */
highwater_status highwater_device_warm(struct highwater_device *device, size_t handles);

/**
 * Waits for all work of the device.
 */
highwater_status highwater_device_synchronize(struct highwater_device *device);

/**
 * Releases the handle.
 */
highwater_status highwater_device_release(struct highwater_device **device);

/**
 * Creates a stream.
 */
highwater_status highwater_stream_create(struct highwater_device *device, struct highwater_stream **stream);

/**
 * Wraps a stream of other code: the vendor's handle as a number. The caller must keep that stream alive until this handle is
 * released and every buffer that was used on it is too. Refuses 0, because it names two default streams.
 */
highwater_status highwater_stream_wrap(struct highwater_device *device,
                                       uint64_t raw,
                                       struct highwater_stream **stream);

/**
 * Wraps the legacy default stream of the device.
 */
highwater_status highwater_stream_legacy_default(struct highwater_device *device, struct highwater_stream **stream);

/**
 * Wraps the default stream of the calling thread. Only this thread can use the handle; in others, calls return
 * HIGHWATER_ERROR_INVALID_STATE. Any thread may release it.
 */
highwater_status highwater_stream_per_thread_default(struct highwater_device *device, struct highwater_stream **stream);

/**
 * Writes the vendor's handle of the stream. The caller must not destroy it.
 */
highwater_status highwater_stream_raw(struct highwater_stream *stream, uint64_t *raw);

/**
 * Waits for all work of the stream.
 */
highwater_status highwater_stream_synchronize(struct highwater_stream *stream);

/**
 * Writes whether all work of the stream is done.
 */
highwater_status highwater_stream_is_complete(struct highwater_stream *stream, bool *complete);

/**
 * Records an event after the work of the stream so far.
 */
highwater_status highwater_stream_record(struct highwater_stream *stream, struct highwater_event **event);

/**
 * As highwater_stream_record, for highwater_event_elapsed_ns.
 */
highwater_status highwater_stream_record_timed(struct highwater_stream *stream, struct highwater_event **event);

/**
 * Makes later work of the stream wait for an event. The thread does not wait.
 */
highwater_status highwater_stream_wait(struct highwater_stream *stream, struct highwater_event *event);

/**
 * As highwater_stream_wait, for an event of other code: the vendor's handle as a number. The event must be live.
 */
highwater_status highwater_stream_wait_raw(struct highwater_stream *stream, uint64_t event);

/**
 * Releases the handle. Queued work continues.
 */
highwater_status highwater_stream_release(struct highwater_stream **stream);

/**
 * Wraps an event of other code: the vendor's handle as a number. The caller must keep that event alive until this handle is
 * released.
 */
highwater_status highwater_event_wrap(struct highwater_device *device,
                                      uint64_t raw,
                                      struct highwater_event **event);

/**
 * Writes whether the stream has passed the event.
 */
highwater_status highwater_event_is_complete(struct highwater_event *event, bool *complete);

/**
 * Waits until the stream has passed the event.
 */
highwater_status highwater_event_synchronize(struct highwater_event *event);

/**
 * Writes the nanoseconds from one event to a later one, both recorded by highwater_stream_record_timed.
 */
highwater_status highwater_event_elapsed_ns(struct highwater_event *earlier,
                                            struct highwater_event *later,
                                            uint64_t *nanoseconds);

/**
 * Releases the handle.
 */
highwater_status highwater_event_release(struct highwater_event **event);

/**
 * Allocates device memory. Its contents are unspecified.
 */
highwater_status highwater_device_allocate(struct highwater_device *device,
                                           size_t bytes,
                                           struct highwater_buffer **buffer);

/**
 * Allocates device memory that other processes can open.
 */
highwater_status highwater_device_allocate_shared(struct highwater_device *device,
                                                  size_t bytes,
                                                  struct highwater_buffer **buffer);

/**
 * Allocates device memory from the stream's pool, in the order of its work. It is the cheapest kind of scratch memory.
 */
highwater_status highwater_stream_allocate(struct highwater_stream *stream,
                                           size_t bytes,
                                           struct highwater_buffer **buffer);

/**
 * Makes a buffer over device memory that other code allocated. Once the last use has ended, after the release, `keep_alive_end`
 * is called with `user` in any thread; it may be null. Until then the caller must keep the memory. If this function fails,
 * it calls it at once. It must not throw.
 */
highwater_status highwater_device_adopt(struct highwater_device *device,
                                        uint64_t address,
                                        size_t bytes,
                                        highwater_end_callback keep_alive_end,
                                        void *user,
                                        struct highwater_buffer **buffer);

/**
 * Writes the address of the memory on its device.
 */
highwater_status highwater_buffer_address(struct highwater_buffer *buffer, uint64_t *address);

/**
 * Writes the number of bytes.
 */
highwater_status highwater_buffer_bytes(struct highwater_buffer *buffer, size_t *bytes);

/**
 * Notes that work which other code enqueues on the stream uses the memory. Call it before the work is enqueued. One note covers
 * all work on the stream until the buffer is released. The memory is freed or reused only after that work.
 */
highwater_status highwater_buffer_used_on(struct highwater_buffer *buffer,
                                          struct highwater_stream *stream);

/**
 * Releases the handle. The memory is freed or reused after the last work that uses it.
 */
highwater_status highwater_buffer_release(struct highwater_buffer **buffer);

/**
 * Returns page-locked memory from the pool. Its contents are unspecified.
 */
highwater_status highwater_pinned_allocate(struct highwater_runtime *runtime,
                                           size_t bytes,
                                           struct highwater_pinned **pinned);

/**
 * As highwater_pinned_allocate, on the NUMA node of the device.
 */
highwater_status highwater_device_pinned_allocate(struct highwater_device *device,
                                                  size_t bytes,
                                                  struct highwater_pinned **pinned);

/**
 * Writes the address of the memory. Before the CPU accesses memory that a stream has used, call highwater_pinned_wait.
 */
highwater_status highwater_pinned_data(struct highwater_pinned *pinned, void **data);

/**
 * Writes the number of bytes.
 */
highwater_status highwater_pinned_bytes(struct highwater_pinned *pinned, size_t *bytes);

/**
 * Waits until the CPU can access the memory without a race. To read it, the call waits for every stream that writes it; to write it,
 * for every stream that uses it. Returns an error of a copy into the memory.
 */
highwater_status highwater_pinned_wait(struct highwater_pinned *pinned,
                                       bool to_write);

/**
 * Notes that work which other code has enqueued on the stream so far uses the memory. Call it after the work is enqueued, and
 * before the memory is accessed, copied or released. The memory is reused only after that work.
 */
highwater_status highwater_pinned_used_on(struct highwater_pinned *pinned,
                                          struct highwater_stream *stream,
                                          bool writes);

/**
 * Releases the handle. The memory is reused after the last work that uses it.
 */
highwater_status highwater_pinned_release(struct highwater_pinned **pinned);

/**
 * Enqueues a copy of pinned memory to a device. Returns at once.
 */
highwater_status highwater_copy_to_device(struct highwater_stream *stream,
                                          struct highwater_pinned *source,
                                          size_t source_offset,
                                          struct highwater_buffer *destination,
                                          size_t destination_offset,
                                          size_t bytes);

/**
 * Enqueues a copy of device memory to pinned memory. Returns at once; highwater_pinned_wait waits for the bytes.
 */
highwater_status highwater_copy_to_host(struct highwater_stream *stream,
                                        struct highwater_buffer *source,
                                        size_t source_offset,
                                        struct highwater_pinned *destination,
                                        size_t destination_offset,
                                        size_t bytes);

/**
 * Enqueues a copy between buffers, also of two devices.
 */
highwater_status highwater_copy(struct highwater_stream *stream,
                                struct highwater_buffer *source,
                                size_t source_offset,
                                struct highwater_buffer *destination,
                                size_t destination_offset,
                                size_t bytes);

/**
 * Enqueues a copy of rows of pinned memory to a device, as cudaMemcpy2DAsync does. The first row begins at the offsets. Bytes
 * between the rows keep their value. Returns at once.
 *
 * HIGHWATER_ERROR_INVALID_ARGUMENT: a pitch is less than the width, or the rows leave the memory.
 */
highwater_status highwater_copy_2d_to_device(struct highwater_stream *stream,
                                             struct highwater_pinned *source,
                                             size_t source_offset,
                                             struct highwater_buffer *destination,
                                             size_t destination_offset,
                                             const struct highwater_copy_shape *shape);

/**
 * As highwater_copy_2d_to_device, from a device to pinned memory. highwater_pinned_wait waits for the bytes.
 */
highwater_status highwater_copy_2d_to_host(struct highwater_stream *stream,
                                           struct highwater_buffer *source,
                                           size_t source_offset,
                                           struct highwater_pinned *destination,
                                           size_t destination_offset,
                                           const struct highwater_copy_shape *shape);

/**
 * As highwater_copy_2d_to_device, between buffers of one or two devices. The buffers may be the same, if no row of one side overlaps a
 * row of the other.
 */
highwater_status highwater_copy_2d(struct highwater_stream *stream,
                                   struct highwater_buffer *source,
                                   size_t source_offset,
                                   struct highwater_buffer *destination,
                                   size_t destination_offset,
                                   const struct highwater_copy_shape *shape);

/**
 * Copies any memory of the host to a device, staged through pinned memory. The caller may change or free the source after the
 * call. The copy to the device is enqueued.
 */
highwater_status highwater_write(struct highwater_stream *stream,
                                 const void *source,
                                 struct highwater_buffer *destination,
                                 size_t destination_offset,
                                 size_t bytes);

/**
 * Copies device memory to any memory of the host. Waits for the copy.
 */
highwater_status highwater_read(struct highwater_stream *stream,
                                struct highwater_buffer *source,
                                size_t source_offset,
                                void *destination,
                                size_t bytes);

/**
 * Enqueues a fill of bytes with one value.
 */
highwater_status highwater_fill(struct highwater_stream *stream,
                                struct highwater_buffer *buffer,
                                size_t offset,
                                size_t bytes,
                                uint8_t value);

/**
 * Enqueues a product with a BLAS handle of the pool and the workspace of the stream. Returns without waiting for it.
 */
highwater_status highwater_gemm_run(struct highwater_stream *stream, const struct highwater_gemm *gemm);

/**
 * Leases a BLAS handle of the pool and lends the vendor's handle to the callback: cublasHandle_t or hipblasHandle_t as a number.
 * It is bound to the stream and to a workspace of its own. The callback enqueues its work. It must not destroy the handle, throw or
 * jump. The call then restores every setting of the handle. The handle of the mock is only a number: no library accepts it.
 */
highwater_status highwater_blas_lend(struct highwater_stream *stream,
                                     highwater_blas_callback callback,
                                     void *user);

/**
 * As highwater_blas_lend, for code that only enqueues, such as cublasSgemm. Restores nothing afterward, so a repetition makes no call of
 * the vendor. The handle is bound to the stream's own workspace, and the workspace of the callback is 0.
 *
 * The callback must not change a setting of the handle, and must not destroy or keep it. It must enqueue its work on this stream only. It
 * must call no function of this library, because the call holds the submission lock of the stream. A function that uses the stream, or
 * memory that the stream has used, would block forever. So would two threads that use each other's streams. It must not throw or jump.
 */
highwater_status highwater_blas_enqueue(struct highwater_stream *stream,
                                        highwater_blas_callback callback,
                                        void *user);

/**
 * As highwater_blas_lend, for an Lt handle: cublasLtHandle_t or hipblasLtHandle_t as a number. The callback passes the workspace to each call.
 */
highwater_status highwater_blas_lt_lend(struct highwater_stream *stream,
                                        highwater_blas_callback callback,
                                        void *user);

/**
 * Records the work that the callback enqueues on the stream, without executing it. `mode` is HIGHWATER_CAPTURE_... The callback
 * returns 0, or a status that ends the capture and that this function returns. It must not throw or jump. Memory must be allocated
 * before, or by highwater_stream_allocate.
 */
highwater_status highwater_capture(struct highwater_stream *stream,
                                   uint32_t mode,
                                   highwater_capture_callback callback,
                                   void *user,
                                   struct highwater_graph **graph);

/**
 * Enqueues the recorded work on a stream. Several threads that launch one graph take turns.
 */
highwater_status highwater_graph_launch(struct highwater_graph *graph, struct highwater_stream *stream);

/**
 * Releases the handle. The graph is destroyed after its last launch.
 */
highwater_status highwater_graph_release(struct highwater_graph **graph);

/**
 * Makes a ticket that lets other processes open the buffer: a text without line breaks. Work that was enqueued on the buffer
 * before is done when they have opened it. Release the text with highwater_text_release.
 *
 * The ticket keeps nothing alive: keep the buffer until the others have opened it.
 * HIGHWATER_ERROR_INVALID_ARGUMENT: the buffer is not from highwater_device_allocate_shared, and not adopted.
 */
highwater_status highwater_buffer_share(struct highwater_buffer *buffer,
                                        char **ticket);

/**
 * Opens the buffer of a ticket. The memory stays until every process has released it. `owner_death` is
 * HIGHWATER_OWNER_DEATH_KEEP, _RELEASE or _INHERIT: what happens to the memory when its owner dies.
 * HIGHWATER_ERROR_EXPIRED: the owner has ended, or has released the buffer.
 */
highwater_status highwater_ticket_open(struct highwater_runtime *runtime,
                                       const char *ticket,
                                       uint32_t owner_death,
                                       struct highwater_buffer **buffer);

/**
 * Makes page-locked memory that other processes can open, as one copy for all of them. The bytes are zeros. It is not from the pool:
 * each call makes a file in memory, and registers it.
 */
highwater_status highwater_pinned_allocate_shared(struct highwater_runtime *runtime,
                                                  size_t bytes,
                                                  struct highwater_pinned **pinned);

/**
 * As highwater_pinned_allocate_shared, on the NUMA node of the device.
 */
highwater_status highwater_device_pinned_allocate_shared(struct highwater_device *device,
                                                         size_t bytes,
                                                         struct highwater_pinned **pinned);

/**
 * Makes a ticket for highwater_pinned_open: a text without line breaks. Release it with highwater_text_release. Device work that was
 * enqueued on the memory before is done when other processes have opened it. `pinned` must come from highwater_pinned_allocate_shared.
 * No other thread may copy to it during the call.
 *
 * If `writable` is false, the memory is read-only from this call on, here and in every process, and the CPU must not write it.
 * Otherwise every process may write it. The program must then order the accesses of all processes and devices.
 * HIGHWATER_ERROR_INVALID_STATE: `writable` is true, and the memory was shared as read-only.
 */
highwater_status highwater_pinned_share(struct highwater_pinned *pinned,
                                        bool writable,
                                        char **ticket);

/**
 * Opens the page-locked memory of a ticket of highwater_pinned_share, without a copy. The memory stays until every process has released
 * it or has ended. `owner_death` is HIGHWATER_OWNER_DEATH_KEEP or _INHERIT.
 * HIGHWATER_ERROR_EXPIRED: the owner has ended, or has released the memory. HIGHWATER_ERROR_UNSUPPORTED: HIGHWATER_OWNER_DEATH_RELEASE,
 * because the CPU may read the memory at any time.
 */
highwater_status highwater_pinned_open(struct highwater_runtime *runtime,
                                       const char *ticket,
                                       uint32_t owner_death,
                                       struct highwater_pinned **pinned);

/**
 * Makes a handle of the process that owns the memory of an opened buffer. HIGHWATER_ERROR_INVALID_ARGUMENT: this process owns it.
 */
highwater_status highwater_buffer_owner(struct highwater_buffer *buffer,
                                        struct highwater_owner **owner);

/**
 * As highwater_buffer_owner, for page-locked memory.
 */
highwater_status highwater_pinned_owner(struct highwater_pinned *pinned, struct highwater_owner **owner);

/**
 * Writes the process id of the owner, as this process sees it. Writes 0 for a process of another PID namespace. After the death, the id may
 * name another process.
 */
highwater_status highwater_owner_pid(struct highwater_owner *owner,
                                     uint32_t *pid);

/**
 * Writes whether the owner is alive. A stopped process is alive.
 */
highwater_status highwater_owner_is_alive(struct highwater_owner *owner, bool *alive);

/**
 * Waits for the death of the owner, for at most some milliseconds. Writes whether it is dead.
 */
highwater_status highwater_owner_wait(struct highwater_owner *owner, uint64_t milliseconds, bool *dead);

/**
 * Writes a descriptor that becomes readable when the owner dies, for poll and epoll: a pidfd. The caller must close it. It may outlive
 * the handle and the runtime.
 */
highwater_status highwater_owner_descriptor(struct highwater_owner *owner,
                                            int *descriptor);

/**
 * Calls `callback` with `user` once when the owner dies, or soon if it is dead. By then, calls on buffers that were opened with
 * HIGHWATER_OWNER_DEATH_RELEASE are refused.
 *
 * The sharing thread of the runtime makes the call. Until the callback returns, that thread answers no other process and releases no
 * memory. So the callback should only signal another thread. It may release buffers. It must not throw or jump.
 *
 * The release of the watch cancels a call that has not begun, and does not wait for one that has. `user_end`, if not null, is called with
 * `user` exactly once, in any thread. That call comes after the callback has returned, or once no call of it can follow. It also comes if
 * this function fails, or if the runtime ends before the owner. From then on, the caller may free memory of `user`.
 */
highwater_status highwater_owner_on_death(struct highwater_owner *owner,
                                          highwater_death_callback callback,
                                          void *user,
                                          highwater_end_callback user_end,
                                          struct highwater_death_watch **watch);

/**
 * Releases the handle, and cancels the call if it has not begun. Does not wait.
 */
highwater_status highwater_death_watch_release(struct highwater_death_watch **watch);

/**
 * Releases the handle. Watches stay.
 */
highwater_status highwater_owner_release(struct highwater_owner **owner);

/**
 * Hands all shared memory of the runtime over to an heir: a process that has opened each of its tickets with
 * HIGHWATER_OWNER_DEATH_INHERIT. Nothing is copied, and no open is refused meanwhile. The heir answers the tickets from then on. This
 * process may then end, or use its buffers further. It cannot share memory that it has not shared before.
 *
 * The call waits for the device work of this process, and then for an heir, for at most some milliseconds. After an error, this process
 * still owns the memory. HIGHWATER_ERROR_INVALID_STATE: no heir took all of it in time, or nothing is shared.
 * HIGHWATER_ERROR_UNSUPPORTED: some memory is adopted or has no descriptor.
 */
highwater_status highwater_hand_over(struct highwater_runtime *runtime,
                                     uint64_t milliseconds);

/**
 * For torch.cuda.memory.CUDAPluggableAllocator: allocates device memory from the pool of a stream. Null is the legacy default stream. A
 * per-thread default stream is refused. Every other stream must live as long as the process, as PyTorch's do. Returns null for 0 bytes and
 * after an error.
 */
void *highwater_torch_alloc(ptrdiff_t bytes,
                            int device,
                            void *stream);

/**
 * Frees memory of highwater_torch_alloc. Does not wait: it is reused after the work of its streams. Does nothing with null.
 */
void highwater_torch_free(void *address,
                          ptrdiff_t bytes,
                          int device,
                          void *stream);

/**
 * Notes that a stream other than the first uses the memory, before the work is enqueued. PyTorch's set_record_stream_fn takes it.
 */
void highwater_torch_record_stream(void *address,
                                   void *stream);

/**
 * Allocates page-locked memory in one registration, aligned to 256 bytes. Returns null for 0 bytes and after an error.
 */
void *highwater_pinned_malloc(size_t bytes);

/**
 * Frees memory of highwater_pinned_malloc. No work may use it, because Highwater does not see copies that other code enqueues. Does
 * nothing with null.
 */
void highwater_pinned_free(void *address);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HIGHWATER_HIGHWATER_H */
