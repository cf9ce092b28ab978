/* highwater.h: backends of Highwater as plugins, in C.
 *
 * Made from the list in highwater-core's plugin module; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A plugin is a shared library that exports one function, highwater_plugin. The program calls it once, and the plugin answers
 * with a struct that says who it is and where its table is. Through the table the program opens a backend and uses it.
 *
 * What holds for everything here:
 *  - Every function of the table answers 0, or one of HW_ERROR_..., and then says what was wrong in *error. It writes to its
 *    answer only where it answers 0.
 *  - Functions may be called from any thread, and several at once, except that a handle is used by one thread at a time. No
 *    device or context is current before; the plugin leaves the caller's as it was.
 *  - Every struct that is handed over by a pointer begins with its size in bytes, which the side that makes it sets; hw_id,
 *    hw_location and hw_gemm_shape stand inside of others, have none, and never grow. A shorter struct means zeros for the rest.
 *    A longer one is to be refused (HW_ERROR_INVALID_ARGUMENT) where it is not zero behind what the reader knows. Into a
 *    struct for an answer, no more than its size is written, and its size is set to what was written.
 *  - Structs and the table only ever grow at the end. Slots that are null are not supported. Slots are in groups: a table has
 *    all of a group or none.
 *  - Pointers in arguments are good until the call returns. What the plugin gives in hw_plugin lives as long as the process.
 *  - Nothing may be thrown or jumped over the border. HW_PANICKED says that something was, inside the plugin, which is then not
 *    called any more.
 *  - The library is never unloaded. Nothing is called in a forked child, and nothing once the process exits.
 *  - Matrices are column-major. Sizes are bytes where nothing else is said.
 *
 * Clauses are the promises that the program relies on. Each has an id, such as stream.order. The comment of an operation lists
 * the clauses that it has to keep. `highwater conformance --plugin FILE` tests every one and names those that a failed case is
 * about. Every operation has to keep these:
 *  - backend.ids-checked: a stale, foreign or forged id gives HW_ERROR_INVALID_HANDLE, and nothing happens.
 *  - backend.device-checked: an ordinal not below `device_count` gives HW_ERROR_INVALID_ARGUMENT.
 *  - backend.lacking: what a capability denies gives HW_ERROR_UNSUPPORTED, and nothing happens.
 *  - backend.concurrent: calls from several threads at once do not disturb each other.
 *  - backend.live-objects: what is made counts in `live_objects` until it is destroyed.
 *  - backend.forked: in a child forked after the backend was opened, calls give HW_ERROR_FORKED at once.
 */
#ifndef HIGHWATER_H
#define HIGHWATER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Versions of the table that this header describes. */
#define HW_TABLE_VERSION_MIN 1u
#define HW_TABLE_VERSION_MAX 1u

/* Answers: all went well; something was thrown inside the plugin. */
#define HW_OK 0
#define HW_PANICKED (-1)

/* Numbers for an answer's code. */
#define HW_ERROR_INVALID_ARGUMENT 1
#define HW_ERROR_INVALID_HANDLE 2
#define HW_ERROR_INVALID_POINTER 3
#define HW_ERROR_WRONG_DEVICE 4
#define HW_ERROR_UNSUPPORTED 5
#define HW_ERROR_OUT_OF_MEMORY 6
#define HW_ERROR_LIBRARY_MISSING 7
#define HW_ERROR_SYMBOL_MISSING 8
#define HW_ERROR_DEVICE_MISSING 9
#define HW_ERROR_UNKNOWN_BACKEND 10
#define HW_ERROR_CAPTURE 11
#define HW_ERROR_INVALID_STATE 12
#define HW_ERROR_DEVICE_LOST 13
#define HW_ERROR_SHUTTING_DOWN 14
#define HW_ERROR_FORKED 15
#define HW_ERROR_PEER_LOST 16
#define HW_ERROR_EXPIRED 17
#define HW_ERROR_OPERATING_SYSTEM 18
#define HW_ERROR_PERMISSION_DENIED 19
#define HW_ERROR_VENDOR 20

/* Numbers for a stream's priority. */
#define HW_STREAM_PRIORITY_NORMAL 0u
#define HW_STREAM_PRIORITY_LOW 1u
#define HW_STREAM_PRIORITY_HIGH 2u

/* Numbers for an answer to "is it done?". */
#define HW_COMPLETE 0u
#define HW_PENDING 1u

/* Numbers for a capture's mode. */
#define HW_CAPTURE_THREAD_LOCAL 0u
#define HW_CAPTURE_GLOBAL 1u
#define HW_CAPTURE_RELAXED 2u

/* Numbers for a kind of page-locked memory. */
#define HW_HOST_MEMORY_DEFAULT 0u
#define HW_HOST_MEMORY_WRITE_COMBINED 1u

/* Numbers for a way in which memory is shared. */
#define HW_TRANSPORT_LEGACY 0u
#define HW_TRANSPORT_DESCRIPTOR 1u
#define HW_TRANSPORT_FABRIC 2u

/* Numbers for a kind of handle. */
#define HW_BLAS_KIND_BLAS 0u
#define HW_BLAS_KIND_LT 1u

/* Numbers for a precision of 32-bit products. */
#define HW_MATH_MODE_DEFAULT 0u
#define HW_MATH_MODE_TF32 1u

/* Numbers for an atomics mode. */
#define HW_ATOMICS_MODE_NOT_ALLOWED 0u
#define HW_ATOMICS_MODE_ALLOWED 1u

/* Numbers for an element type. */
#define HW_DATA_TYPE_F32 0u
#define HW_DATA_TYPE_F64 1u
#define HW_DATA_TYPE_F16 2u
#define HW_DATA_TYPE_BF16 3u

/* Numbers for what a plan does after the product. */
#define HW_EPILOGUE_NONE 0u
#define HW_EPILOGUE_BIAS 1u
#define HW_EPILOGUE_BIAS_RELU 2u
#define HW_EPILOGUE_RELU 3u
#define HW_EPILOGUE_GELU 4u
#define HW_EPILOGUE_BIAS_GELU 5u

/* Numbers for a kind of device memory. */
#define HW_DEVICE_MEMORY_PLAIN 0u
#define HW_DEVICE_MEMORY_SHAREABLE 1u
#define HW_DEVICE_MEMORY_STREAM_ORDERED 2u

/* Numbers for the side of a copy. */
#define HW_LOCATION_HOST 0u
#define HW_LOCATION_DEVICE 1u

/* Places in ids: those from the first on are no objects; the default streams have one each, in generation 1. */
#define HW_FIRST_NAMED_SLOT 4294967280u
#define HW_SLOT_LEGACY_DEFAULT_STREAM 4294967294u
#define HW_SLOT_PER_THREAD_DEFAULT_STREAM 4294967293u

/* Levels of log lines. */
#define HW_LOG_ERROR 1u
#define HW_LOG_WARN 2u
#define HW_LOG_INFO 3u
#define HW_LOG_DEBUG 4u
#define HW_LOG_TRACE 5u

/* Bits of hw_capabilities.abilities. */
#define HW_CAN_GEMM_F32 (UINT64_C(1) << 0)
#define HW_CAN_GEMM_F64 (UINT64_C(1) << 1)
#define HW_CAN_GEMM_F16 (UINT64_C(1) << 2)
#define HW_CAN_GEMM_BF16 (UINT64_C(1) << 3)
#define HW_CAN_GEMM_MIXED (UINT64_C(1) << 4)
#define HW_CAN_TF32 (UINT64_C(1) << 5)
#define HW_CAN_ATOMICS_MODE (UINT64_C(1) << 6)
#define HW_CAN_BLAS_WORKSPACE (UINT64_C(1) << 7)
#define HW_CAN_STRIDED_BATCH (UINT64_C(1) << 8)
#define HW_CAN_LT_PLANS (UINT64_C(1) << 9)
#define HW_CAN_CAPTURE (UINT64_C(1) << 10)
#define HW_CAN_STREAM_ORDERED_MEMORY (UINT64_C(1) << 11)
#define HW_CAN_SHAREABLE_MEMORY (UINT64_C(1) << 12)
#define HW_CAN_INTERPROCESS_EVENTS (UINT64_C(1) << 13)
#define HW_CAN_EVENT_TIMING (UINT64_C(1) << 14)
#define HW_CAN_STREAM_PRIORITY (UINT64_C(1) << 15)
#define HW_CAN_PEER_COPY (UINT64_C(1) << 16)
#define HW_CAN_HOST_REGISTER (UINT64_C(1) << 17)
#define HW_CAN_WRITE_COMBINED (UINT64_C(1) << 18)
#define HW_CAN_LEGACY_DEFAULT_STREAM (UINT64_C(1) << 19)
#define HW_CAN_PER_THREAD_DEFAULT_STREAM (UINT64_C(1) << 20)
#define HW_CAN_FOREIGN_OBJECTS (UINT64_C(1) << 21)

/* Bits of hw_capabilities.facts. */
#define HW_FACT_SET_STREAM_RESETS_WORKSPACE (UINT64_C(1) << 0)
#define HW_FACT_HANDLE_PER_STREAM (UINT64_C(1) << 1)
#define HW_FACT_CREATE_DURING_CAPTURE (UINT64_C(1) << 2)
#define HW_FACT_HOST_ADDRESS_IS_DEVICE_ADDRESS (UINT64_C(1) << 3)
#define HW_FACT_PINNED_CACHED_BY_DEVICE (UINT64_C(1) << 4)
#define HW_FACT_EVENT_WAITS_END_WITH_PEER (UINT64_C(1) << 5)

/* An open backend, and a BLAS or an Lt handle: only the plugin knows what they are. */
typedef struct hw_backend hw_backend;
typedef struct hw_handle hw_handle;
typedef struct hw_table hw_table;

/* A stream, an event, a graph or an executable graph. The backend issues it and checks it whenever it comes back: a
 * stale, foreign or forged one is HW_ERROR_INVALID_HANDLE, and nothing happens. */
typedef struct hw_id {
    /* Place in a table of the backend, below HW_FIRST_NAMED_SLOT; or a default stream, HW_SLOT_... */
    uint32_t slot;
    /* Which object of that place, from 1: grows each time the place is used again. */
    uint32_t generation;
    /* The tag that the program gave when it opened the backend; in every id. */
    uint32_t tag;
    /* Ordinal of the device that the object belongs to. */
    uint32_t device;
} hw_id;

/* What went wrong, filled by the callee where it answers another code than 0. The caller has set `size` and emptied
 * the rest. */
typedef struct hw_error {
    /* Bytes of this struct. */
    uint64_t size;
    /* The vendor's own code, where `has_vendor_code` is 1. */
    int64_t vendor_code;
    /* Whether there is one: 0 or 1. */
    uint32_t has_vendor_code;
    /* Zero. */
    uint32_t reserved;
    /* What was wrong and what was expected; UTF-8 with a NUL. */
    char message[512];
    /* What to do about it, or nothing. */
    char hint[256];
} hw_error;

/* Takes a log line: HW_LOG_..., the text, its bytes. May be called from any thread. */
typedef void (*hw_log_call)(uint32_t level, const char *text, uint64_t bytes);

/* What the program offers a plugin; valid for the life of the process. */
typedef struct hw_host {
    /* Bytes of this struct. */
    uint64_t size;
    /* Lowest version of the table that the program takes. */
    uint32_t version_min;
    /* Highest version of the table that the program takes. */
    uint32_t version_max;
    /* Takes log lines, from any thread; may be null. */
    hw_log_call log;
} hw_host;

/* What opens a backend. */
typedef struct hw_open {
    /* Bytes of this struct. */
    uint64_t size;
    /* The version of the table that was agreed on. */
    uint32_t version;
    /* The tag of every id that this backend issues; not 0. Another one each time a backend is opened. */
    uint32_t tag;
} hw_open;

/* Opens the backend, which has one device at least. If it cannot, the answer says why: HW_ERROR_LIBRARY_MISSING for a
 * library of the vendor's, HW_ERROR_SYMBOL_MISSING for a function in it, HW_ERROR_DEVICE_MISSING where no device is there. The
 * program reports it, and tries other backends unless this one was asked for. */
typedef int32_t (*hw_open_call)(const hw_open *request, hw_backend **backend, hw_error *error);
/* Gives the table of a version, one of those that the plugin named. */
typedef const hw_table *(*hw_table_call)(uint32_t version);

/* What a plugin is; it stays valid and unchanged for the life of the process. The texts are UTF-8 with a NUL. */
typedef struct hw_plugin {
    /* Bytes of this struct. */
    uint64_t size;
    /* Lowest version of the table that the plugin has. */
    uint32_t version_min;
    /* Highest version of the table that the plugin has. */
    uint32_t version_max;
    /* The name under which it is opened: letters, digits, `-` and `_`, at most 63. */
    const char *name;
    /* What it drives, for people. */
    const char *description;
    /* Who made it. */
    const char *vendor;
    /* Its own version. */
    const char *version;
    /* Opens the backend. May be called again, for a second one. */
    hw_open_call open;
    /* Gives the table of a version. */
    hw_table_call table;
} hw_plugin;

/* Who a backend is. */
typedef struct hw_identity {
    /* Bytes of this struct. */
    uint64_t size;
    /* Whether there is real hardware behind it: 0 or 1. */
    uint32_t real_device;
    /* Zero. */
    uint32_t reserved;
    /* The name under which it is opened. */
    char name[64];
    /* What it drives, for people. */
    char description[256];
    /* Versions of the backend and of each vendor library: a line `what<TAB>version` for each. */
    char versions[2048];
    /* Environment variables, first set one wins, that size the BLAS workspace as `:KiB:COUNT` pairs: one on a line. */
    char blas_workspace_variables[512];
    /* Environment variables, first set one wins, that size the Lt workspace in KiB: one on a line. */
    char lt_workspace_variables[512];
} hw_identity;

/* What a device is. */
typedef struct hw_device_info {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes of memory. */
    uint64_t memory_bytes;
    /* Ordinal within this process. */
    uint32_t ordinal;
    /* NUMA node, where `has_numa_node` is 1. */
    uint32_t numa_node;
    /* Whether the NUMA node is known: 0 or 1. */
    uint32_t has_numa_node;
    /* Zero. */
    uint32_t reserved;
    /* Identifies the device across processes; the same over the life of the machine. */
    uint8_t uuid[16];
    /* The vendor's name for it. */
    char name[256];
    /* PCI address as `domain:bus:device.function`, or empty. */
    char pci_address[32];
    /* The vendor's architecture: `sm_90`, `gfx942`. */
    char architecture[64];
} hw_device_info;

/* What a device can do and how it behaves. */
typedef struct hw_capabilities {
    /* Bytes of this struct. */
    uint64_t size;
    /* What it can do: HW_CAN_... . A program ignores what it does not know. */
    uint64_t abilities;
    /* How it behaves: HW_FACT_... . */
    uint64_t facts;
    /* Ways in which its memory can be shared: 1 shifted left by HW_TRANSPORT_..., for each. */
    uint32_t ipc_transports;
    /* Zero. */
    uint32_t reserved;
    /* Bytes that the program registers at a time when it makes large blocks of page-locked memory itself; 0: never. */
    uint64_t register_piece_bytes;
    /* Alignment in bytes that a BLAS workspace must have; a power of two. */
    uint64_t workspace_alignment;
    /* Bytes of workspace that a BLAS handle works best with. */
    uint64_t blas_workspace_bytes;
    /* Bytes of workspace that an Lt plan may use by default. */
    uint64_t lt_workspace_bytes;
} hw_capabilities;

/* Free and total memory of a device, in bytes. */
typedef struct hw_memory_info {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes that can be allocated now. */
    uint64_t free;
    /* Bytes that the device has. */
    uint64_t total;
} hw_memory_info;

/* What a backend's objects that are alive come to; all zero when everything was given back. */
typedef struct hw_live_objects {
    /* Bytes of this struct. */
    uint64_t size;
    /* Streams made by `create_stream`. */
    uint64_t streams;
    /* Events made by `create_event` or opened. */
    uint64_t events;
    /* BLAS and Lt handles. */
    uint64_t handles;
    /* Blocks of device memory. */
    uint64_t allocations;
    /* Blocks of page-locked host memory, allocated or registered. */
    uint64_t host_allocations;
    /* Graphs and executable graphs. */
    uint64_t graphs;
    /* Memory of other processes that is mapped here. */
    uint64_t mappings;
    /* File descriptors made for sharing. */
    uint64_t descriptors;
    /* Shared files made for sharing. */
    uint64_t shared_files;
} hw_live_objects;

/* How to make a stream. */
typedef struct hw_stream_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* HW_STREAM_PRIORITY_... . */
    uint32_t priority;
    /* Zero. */
    uint32_t reserved;
} hw_stream_options;

/* How to make an event. */
typedef struct hw_event_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* Whether `event_elapsed_ns` may be asked: 0 or 1. */
    uint32_t timing;
    /* Whether another process may open it: 0 or 1. */
    uint32_t interprocess;
} hw_event_options;

/* How to allocate device memory. */
typedef struct hw_allocate_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes to allocate; 0 is HW_ERROR_INVALID_ARGUMENT. */
    uint64_t bytes;
    /* HW_DEVICE_MEMORY_... . */
    uint32_t kind;
    /* HW_TRANSPORT_..., for HW_DEVICE_MEMORY_SHAREABLE; else 0. */
    uint32_t transport;
    /* The stream, for HW_DEVICE_MEMORY_STREAM_ORDERED; else zeros. */
    hw_id stream;
} hw_allocate_options;

/* How to make page-locked memory. */
typedef struct hw_host_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* HW_HOST_MEMORY_... . */
    uint32_t kind;
    /* Zero. */
    uint32_t reserved;
} hw_host_options;

/* One side of a copy. */
typedef struct hw_location {
    /* HW_LOCATION_... . */
    uint32_t kind;
    /* Ordinal of the device, for HW_LOCATION_DEVICE; else 0. */
    uint32_t device;
    /* The address there. */
    uint64_t address;
} hw_location;

/* A copy of bytes; source and destination do not overlap. */
typedef struct hw_memory_copy {
    /* Bytes of this struct. */
    uint64_t size;
    /* Where to. */
    hw_location dst;
    /* Where from. */
    hw_location src;
    /* Bytes to copy; 0 copies nothing and is no error. */
    uint64_t bytes;
} hw_memory_copy;

/* A fill of device memory with one element. */
typedef struct hw_memory_fill {
    /* Bytes of this struct. */
    uint64_t size;
    /* First byte; a multiple of the element's size. */
    uint64_t dst;
    /* How many elements; 0 fills nothing and is no error. */
    uint64_t count;
    /* Ordinal of the device. */
    uint32_t device;
    /* Bytes of the element: 1, 2 or 4. */
    uint32_t pattern_bytes;
    /* The element, in the lowest bytes. */
    uint32_t pattern;
    /* Zero. */
    uint32_t reserved;
} hw_memory_fill;

/* Shape of `C = alpha * op(A) * op(B) + beta * C`: op(A) is m x k, op(B) is k x n, C is m x n, all column-major. */
typedef struct hw_gemm_shape {
    /* Element type of A and B: HW_DATA_TYPE_... . */
    uint32_t data_type;
    /* Element type of C, D and the bias: HW_DATA_TYPE_... . */
    uint32_t output;
    /* Whether op(A) is A transposed: 0 or 1. */
    uint32_t transpose_a;
    /* Whether op(B) is B transposed: 0 or 1. */
    uint32_t transpose_b;
    /* Rows of C. */
    uint64_t m;
    /* Columns of C. */
    uint64_t n;
    /* Columns of op(A) and rows of op(B). */
    uint64_t k;
    /* Leading dimension of A, in elements. */
    uint64_t lda;
    /* Leading dimension of B, in elements. */
    uint64_t ldb;
    /* Leading dimension of C, in elements. */
    uint64_t ldc;
    /* Whether there are several products at equal distances: 0 or 1. */
    uint32_t has_batch;
    /* Zero. */
    uint32_t reserved;
    /* How many products, with `has_batch`. */
    uint64_t batch_count;
    /* Elements from one A to the next; 0 uses the same A in each product. */
    uint64_t stride_a;
    /* Elements from one B to the next; 0 uses the same B in each product. */
    uint64_t stride_b;
    /* Elements from one C to the next; the Cs do not overlap. */
    uint64_t stride_c;
} hw_gemm_shape;

/* One matrix product. */
typedef struct hw_gemm {
    /* Bytes of this struct. */
    uint64_t size;
    /* Sizes, leading dimensions, batch. */
    hw_gemm_shape shape;
    /* Factor of the product. */
    double alpha;
    /* Factor of the old C; with 0 the old C is not read. */
    double beta;
    /* First element of A. */
    uint64_t a;
    /* First element of B. */
    uint64_t b;
    /* First element of C. */
    uint64_t c;
} hw_gemm;

/* Device memory for the intermediate results of products. */
typedef struct hw_workspace {
    /* Bytes of this struct. */
    uint64_t size;
    /* First byte. */
    uint64_t address;
    /* Bytes of the memory. */
    uint64_t bytes;
    /* Whether there is one: 0 for the handle's own, or 1. */
    uint32_t present;
    /* Zero. */
    uint32_t reserved;
} hw_workspace;

/* What an Lt plan is made for. */
typedef struct hw_plan_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* Sizes, leading dimensions, batch. */
    hw_gemm_shape shape;
    /* Bytes of workspace that the plan may use. */
    uint64_t workspace_bytes;
    /* Every operand's address is a multiple of this, in bytes. */
    uint64_t alignment;
    /* HW_EPILOGUE_... . */
    uint32_t epilogue;
    /* HW_MATH_MODE_... . */
    uint32_t math_mode;
    /* HW_ATOMICS_MODE_... . */
    uint32_t atomics_mode;
    /* Zero. */
    uint32_t reserved;
} hw_plan_options;

/* Arguments of one run of an Lt plan: `D = epilogue(alpha * op(A) * op(B) + beta * C)`. D may be C. */
typedef struct hw_plan_arguments {
    /* Bytes of this struct. */
    uint64_t size;
    /* Factor of the product. */
    double alpha;
    /* Factor of C; with 0 C is not read. */
    double beta;
    /* First element of A. */
    uint64_t a;
    /* First element of B. */
    uint64_t b;
    /* First element of C. */
    uint64_t c;
    /* First element of D, laid out as C. */
    uint64_t d;
    /* First element of the bias, where `has_bias` is 1. */
    uint64_t bias;
    /* Whether there is a bias: 0 or 1. */
    uint32_t has_bias;
    /* Zero. */
    uint32_t reserved;
} hw_plan_arguments;

/* A handle of device memory for other processes. */
typedef struct hw_memory_handle {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes of the whole allocation. */
    uint64_t bytes;
    /* HW_TRANSPORT_... . */
    uint32_t transport;
    /* A file descriptor that travels beside the payload, or -1. In an answer it is the program's, which closes it; in
     * an argument it stays the program's, and is not closed. */
    int32_t descriptor;
    /* UUID of the device that owns the memory. */
    uint8_t device_uuid[16];
    /* The vendor's handle. */
    uint8_t payload[64];
    /* In an answer with a descriptor: what `release_descriptor` is called with once the program has closed it; 0 for
     * nothing. */
    uint64_t descriptor_token;
} hw_memory_handle;

/* A handle of an event for other processes. */
typedef struct hw_event_handle {
    /* Bytes of this struct. */
    uint64_t size;
    /* A file descriptor, as in `hw_memory_handle`. */
    int32_t descriptor;
    /* Zero. */
    uint32_t reserved;
    /* UUID of the event's device. */
    uint8_t device_uuid[16];
    /* The vendor's handle. */
    uint8_t payload[64];
    /* As in `hw_memory_handle`. */
    uint64_t descriptor_token;
} hw_event_handle;

/* The operations of a backend. */
struct hw_table {
    /* Bytes of this struct. */
    uint64_t size;

    /* ---- group required: what every backend has */
    /* Gives the backend back; nothing of it is used any more. Called once, for the last time in its life, and never once
     * the process exits. */
    int32_t (*close)(hw_backend *backend, hw_error *error);
    /* Who the backend is; the same every time.
     *  - identity.stable: the same value every time.
     *  - identity.tagged: every id that the backend issues carries hw_open.tag. */
    int32_t (*identity)(hw_backend *backend, hw_identity *answer, hw_error *error);
    /* Number of devices, at least 1; their ordinals count from 0. Does not change.
     *  - devices.some: at least 1 (a backend without a device does not open). */
    int32_t (*device_count)(hw_backend *backend, uint32_t *answer, hw_error *error);
    /* What the device is.
     *  - devices.uuid: the UUID is stable over the life of the machine, and no two devices share one. */
    int32_t (*device_info)(hw_backend *backend, uint32_t device, hw_device_info *answer, hw_error *error);
    /* What the device can do; the same every time. Asked once.
     *  - devices.capabilities-stable: the same value every time. */
    int32_t (*capabilities)(hw_backend *backend, uint32_t device, hw_capabilities *answer, hw_error *error);
    /* Free and total memory.
     *  - memory.info: `free <= total`, and `total` is hw_device_info.memory_bytes. */
    int32_t (*memory_info)(hw_backend *backend, uint32_t device, hw_memory_info *answer, hw_error *error);
    /* Objects that are alive, counted by the backend itself. */
    int32_t (*live_objects)(hw_backend *backend, hw_live_objects *answer, hw_error *error);
    /* Whether the process has begun to exit, as far as the backend knows: 0 or 1. The program looks itself too. */
    int32_t (*is_exiting)(hw_backend *backend, uint32_t *answer, hw_error *error);
    /* Makes a stream.
     *  - stream.order: what is enqueued on one stream is executed in the order of the calls.
     *  - stream.asynchronous: enqueueing returns without waiting for what was enqueued before.
     *  - stream.independent: streams of one device do not wait for each other unless told to. */
    int32_t (*create_stream)(hw_backend *backend, uint32_t device, const hw_stream_options *options, hw_id *answer, hw_error *error);
    /* Destroys a stream without waiting; what was enqueued is still executed.
     *  - stream.destroy-pending: what was enqueued is still executed.
     *  - stream.destroy-stale: from here on the id is stale, also for a second `destroy_stream`. */
    int32_t (*destroy_stream)(hw_backend *backend, hw_id stream, hw_error *error);
    /* Whether everything enqueued so far has been executed: HW_COMPLETE or HW_PENDING. Does not wait.
     *  - stream.query: HW_PENDING while work is outstanding, HW_COMPLETE after it. */
    int32_t (*query_stream)(hw_backend *backend, hw_id stream, uint32_t *answer, hw_error *error);
    /* Waits until everything enqueued so far has been executed.
     *  - stream.synchronize: on return the effects of that work are visible to the CPU. */
    int32_t (*synchronize_stream)(hw_backend *backend, hw_id stream, hw_error *error);
    /* Waits for every stream of the device.
     *  - devices.synchronize: on return the work enqueued on any stream of the device has been executed. */
    int32_t (*synchronize_device)(hw_backend *backend, uint32_t device, hw_error *error);
    /* Makes the stream wait, on the device, for the latest record of the event at the time of the call.
     *  - event.wait-orders: work enqueued after the wait runs after the work before the record, also across devices.
     *  - event.wait-snapshot: a record made after the call is not waited for.
     *  - event.never-recorded: waiting for an event that was never recorded is no wait and no error. */
    int32_t (*stream_wait_event)(hw_backend *backend, hw_id stream, hw_id event, hw_error *error);
    /* Makes an event. Timing and sharing at once is HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*create_event)(hw_backend *backend, uint32_t device, const hw_event_options *options, hw_id *answer, hw_error *error);
    /* Destroys an event without waiting.
     *  - event.destroy-pending: a record or a wait already enqueued keeps its effect.
     *  - event.destroy-stale: from here on the id is stale. */
    int32_t (*destroy_event)(hw_backend *backend, hw_id event, hw_error *error);
    /* Marks the point that the stream has reached; replaces the event's earlier point.
     *  - event.record-moves: a further record replaces the point; the earlier one is forgotten.
     *  - event.record-device: a stream of another device than the event's gives HW_ERROR_WRONG_DEVICE. */
    int32_t (*record_event)(hw_backend *backend, hw_id event, hw_id stream, hw_error *error);
    /* Whether the latest record has been reached: HW_COMPLETE, also where there is none, or HW_PENDING.
     *  - event.query: HW_PENDING until the stream has passed the record, then HW_COMPLETE.
     *  - event.query-never-recorded: HW_COMPLETE for an event that was never recorded. */
    int32_t (*query_event)(hw_backend *backend, hw_id event, uint32_t *answer, hw_error *error);
    /* Waits until the latest record has been reached.
     *  - event.synchronize: on return the effects of the work before the record are visible to the CPU. */
    int32_t (*synchronize_event)(hw_backend *backend, hw_id event, hw_error *error);
    /* Allocates device memory with unspecified contents, at a multiple of 256.
     *  - memory.aligned: the address is a multiple of 256.
     *  - memory.disjoint: blocks that are alive do not overlap.
     *  - memory.zero: 0 bytes give HW_ERROR_INVALID_ARGUMENT.
     *  - memory.exhausted: more than there is gives HW_ERROR_OUT_OF_MEMORY, and nothing changes.
     *  - memory.stream-ordered: work enqueued on a block's stream after the allocation has the bytes to itself, and so has
     *    work that waits for an event recorded there after it. */
    int32_t (*allocate)(hw_backend *backend, uint32_t device, const hw_allocate_options *options, uint64_t *answer, hw_error *error);
    /* Frees a block. `stream` is zeros, or the stream in whose order stream-ordered memory is freed.
     *  - memory.free-returns: freed bytes can be allocated again (stream-ordered ones once the stream is past). */
    int32_t (*free)(hw_backend *backend, uint32_t device, uint64_t ptr, hw_id stream, hw_error *error);
    /* Enqueues a copy between device memory and device memory or page-locked host memory.
     *  - copy.exact: exactly `bytes` bytes arrive, unchanged; bytes beside the destination keep their value.
     *  - copy.ordered: the copy runs in the order of the stream.
     *  - copy.zero: 0 bytes copy nothing and give no error. */
    int32_t (*copy)(hw_backend *backend, const hw_memory_copy *copy, hw_id stream, hw_error *error);
    /* Enqueues a fill of device memory.
     *  - fill.exact: exactly `count` elements are written, with each width of pattern.
     *  - fill.ordered: the fill runs in the order of the stream.
     *  - fill.zero: 0 elements fill nothing and give no error. */
    int32_t (*fill)(hw_backend *backend, const hw_memory_fill *fill, hw_id stream, hw_error *error);

    /* ---- group timing: elapsed time between events */
    /* Nanoseconds between the records of two events with timing.
     *  - event.elapsed: at least the time that the device spent between them.
     *  - event.elapsed-invalid: an event without timing or never recorded gives HW_ERROR_INVALID_ARGUMENT, one not reached
     *    yet HW_ERROR_INVALID_STATE. */
    int32_t (*event_elapsed_ns)(hw_backend *backend, hw_id start, hw_id end, uint64_t *answer, hw_error *error);

    /* ---- group foreign: streams and events for other code, and of other code */
    /* The vendor's handle of the stream, as a number. */
    int32_t (*raw_stream)(hw_backend *backend, hw_id stream, uint64_t *answer, hw_error *error);
    /* Wraps a stream that other code made and keeps; `destroy_stream` forgets it. */
    int32_t (*stream_from_raw)(hw_backend *backend, uint32_t device, uint64_t raw, hw_id *answer, hw_error *error);
    /* The vendor's handle of the event, as a number. */
    int32_t (*raw_event)(hw_backend *backend, hw_id event, uint64_t *answer, hw_error *error);
    /* Wraps an event that other code made and keeps; `destroy_event` forgets it. */
    int32_t (*event_from_raw)(hw_backend *backend, uint32_t device, uint64_t raw, hw_id *answer, hw_error *error);

    /* ---- group host: page-locked host memory */
    /* Allocates page-locked memory with unspecified contents, at a multiple of 64.
     *  - host.usable: the CPU can read and write every byte; every device can copy to and from it.
     *  - host.aligned: the address is a multiple of 64.
     *  - host.zero: 0 bytes give HW_ERROR_INVALID_ARGUMENT.
     *  - host.exhausted: more than there is gives HW_ERROR_OUT_OF_MEMORY, and nothing changes. */
    int32_t (*host_allocate)(hw_backend *backend, uint64_t bytes, const hw_host_options *options, void **answer, hw_error *error);
    /* Frees page-locked memory.
     *  - host.free-counts: hw_live_objects.host_allocations goes down by one. */
    int32_t (*host_free)(hw_backend *backend, void *ptr, hw_error *error);
    /* The address under which the device sees page-locked memory.
     *  - host.device-address: the CPU's address where the fact HW_FACT_HOST_ADDRESS_IS_DEVICE_ADDRESS holds. */
    int32_t (*host_device_address)(hw_backend *backend, void *ptr, uint32_t device, uint64_t *answer, hw_error *error);

    /* ---- group register: page-locking memory that somebody else allocated */
    /* Page-locks memory that somebody else allocated.
     *  - host.register-copies: within one registration, registered memory is copied as allocated memory is, from its first
     *    byte to its last; from one registration into another that touches it, no copy has to work.
     *  - host.register-overlap: a range that overlaps one already registered gives HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*host_register)(hw_backend *backend, void *ptr, uint64_t bytes, const hw_host_options *options, hw_error *error);
    /* Undoes `host_register`.
     *  - host.unregister-unknown: an address that `host_register` was not called with gives HW_ERROR_INVALID_POINTER. */
    int32_t (*host_unregister)(hw_backend *backend, void *ptr, hw_error *error);

    /* ---- group blas: BLAS and Lt handles
     *  - blas.kind: what belongs to the other kind (products for HW_BLAS_KIND_LT, plans for HW_BLAS_KIND_BLAS) gives
     *    HW_ERROR_UNSUPPORTED. */
    /* Makes a handle of a kind, HW_BLAS_KIND_..., for one thread at a time.
     *  - blas.create-concurrent: making one handle does not delay calls on other handles, streams or devices. */
    int32_t (*create_handle)(hw_backend *backend, uint32_t device, uint32_t kind, hw_handle **answer, hw_error *error);
    /* Binds the stream that later products are enqueued on.
     *  - blas.stream-bound: products run in the order of the bound stream.
     *  - blas.unbound: until a stream is bound, products and runs of plans give HW_ERROR_INVALID_STATE, and nothing is
     *    enqueued.
     *  - blas.stream-device: a stream of another device gives HW_ERROR_WRONG_DEVICE.
     *  - blas.stream-resets-workspace: where the fact HW_FACT_SET_STREAM_RESETS_WORKSPACE holds, the handle is back on its
     *    own workspace, also when the stream is the same; modes survive. */
    int32_t (*handle_set_stream)(hw_handle *handle, hw_id stream, hw_error *error);
    /* Binds the memory for intermediate results, or the handle's own.
     *  - blas.workspace-used: products keep their intermediate results in the bound workspace.
     *  - blas.workspace-alignment: an address that is not a multiple of hw_capabilities.workspace_alignment gives
     *    HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*handle_set_workspace)(hw_handle *handle, const hw_workspace *workspace, hw_error *error);
    /* Chooses the precision of 32-bit products: HW_MATH_MODE_... . */
    int32_t (*handle_set_math_mode)(hw_handle *handle, uint32_t mode, hw_error *error);
    /* Chooses whether kernels may add with atomics: HW_ATOMICS_MODE_... .
     *  - blas.deterministic: with HW_ATOMICS_MODE_NOT_ALLOWED, equal calls give equal bits. */
    int32_t (*handle_set_atomics_mode)(hw_handle *handle, uint32_t mode, hw_error *error);
    /* Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream. The program has checked sizes, leading
     * dimensions and strides: every element lies in the address space, and no two products of a batch share one.
     *  - gemm.value: every element of C is the product within the rounding of C's type. NaN and infinity in A, B and C reach
     *    the elements that they enter, and no others. Before it is added to `beta * C`, the product may be rounded to that
     *    type.
     *  - gemm.transpose: for each combination of transposed factors.
     *  - gemm.leading-dimension: elements between the rows of C and the leading dimension keep their value.
     *  - gemm.beta: the old C enters with factor beta.
     *  - gemm.beta-zero: with beta 0 the old C is not read (NaN there does not matter).
     *  - gemm.alpha-zero: with alpha 0 or k 0, A and B do not matter.
     *  - gemm.empty: with m, n or the batch 0 nothing is written, and it is no error.
     *  - gemm.strided-batch: the products of a batch are independent and lie at the strides given.
     *  - gemm.mixed: with factors of HW_DATA_TYPE_F16 or HW_DATA_TYPE_BF16 and an output of HW_DATA_TYPE_F32, C is an
     *    HW_DATA_TYPE_F32 matrix, of which the old values enter and the product is stored without a rounding to the factors'
     *    type; the sum is kept in 32 bits, and whatever else is said of C holds. Needs HW_CAN_GEMM_MIXED.
     *  - gemm.mixed-pairs: every other pair of different types gives HW_ERROR_UNSUPPORTED, as a GEMM and as a plan, and
     *    nothing is written.
     *  - gemm.asynchronous: the call returns without waiting for the product. */
    int32_t (*handle_gemm)(hw_handle *handle, const hw_gemm *gemm, hw_error *error);
    /* The vendor's handle, as a number. */
    int32_t (*handle_raw)(hw_handle *handle, uint64_t *answer, hw_error *error);
    /* Destroys the vendor's handle; later calls, but `handle_close`, are HW_ERROR_INVALID_HANDLE.
     *  - blas.destroyed: hw_live_objects.handles goes down by one, also when a handle ends without this call. */
    int32_t (*handle_destroy)(hw_handle *handle, hw_error *error);
    /* Gives the handle back, and destroys the vendor's if that is still there. Called once, for the last time in its life. */
    int32_t (*handle_close)(hw_handle *handle, hw_error *error);

    /* ---- group lt: Lt plans */
    /* Makes a plan, which belongs to the handle. */
    int32_t (*create_plan)(hw_handle *handle, const hw_plan_options *options, uint64_t *answer, hw_error *error);
    /* Enqueues one run of a plan on the bound stream, through the bound workspace.
     *  - plan.value: D is `epilogue(alpha * op(A) * op(B) + beta * C)` within the rounding of D's type. Before an epilogue,
     *    `alpha * op(A) * op(B)` and its sum with C may be rounded to that type.
     *  - plan.epilogue: for each epilogue; the bias is added to every column.
     *  - plan.alpha-zero: with alpha 0 or k 0, A and B do not matter: D is `epilogue(beta * C)`, with the bias that the
     *    epilogue adds.
     *  - plan.mixed: as `gemm.mixed`; C, D and the bias are of the output's type, and no sum is rounded to the factors' type
     *    on the way.
     *  - plan.stale: a destroyed or unknown plan gives HW_ERROR_INVALID_HANDLE.
     *  - plan.alignment: an operand that is not aligned as the plan says, or to its own elements, gives
     *    HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*run_plan)(hw_handle *handle, uint64_t plan, const hw_plan_arguments *arguments, hw_error *error);
    /* Destroys a plan; runs already enqueued are still executed. */
    int32_t (*destroy_plan)(hw_handle *handle, uint64_t plan, hw_error *error);

    /* ---- group capture: stream capture and replay */
    /* Starts to record what is enqueued on the stream instead of executing it, in a mode HW_CAPTURE_... .
     *  - capture.not-executed: nothing enqueued during the capture is executed.
     *  - capture.begin-again: beginning on a stream that takes part in a capture gives HW_ERROR_CAPTURE.
     *  - capture.joins: a stream that waits for an event recorded in the capture takes part in it from there on.
     *  - capture.undisturbed: allocating and freeing plain memory and page-locked memory, registering and unregistering
     *    memory, exporting, opening and closing memory that processes share, creating and destroying events, asking and
     *    waiting for events that were recorded outside and for streams that take no part, and making handles (where
     *    HW_FACT_CREATE_DURING_CAPTURE holds) neither fail nor disturb the capture, from whichever thread and in whichever
     *    mode.
     *  - capture.no-answer: asking or waiting for a stream that takes part, or an event recorded in the capture, gives
     *    HW_ERROR_CAPTURE; the capture may be lost by it. */
    int32_t (*begin_capture)(hw_backend *backend, hw_id stream, uint32_t mode, hw_error *error);
    /* Ends the capture and gives what it recorded.
     *  - capture.lost: a capture that was lost gives HW_ERROR_CAPTURE; afterwards the stream works as before.
     *  - capture.unjoined: where a stream that joined was not waited for by the first one, HW_ERROR_CAPTURE, and the capture
     *    is lost.
     *  - capture.end-without: a stream without a capture gives HW_ERROR_CAPTURE, and nothing changes. */
    int32_t (*end_capture)(hw_backend *backend, hw_id stream, hw_id *answer, hw_error *error);
    /* Whether the stream takes part in a capture: 0 or 1. */
    int32_t (*is_capturing)(hw_backend *backend, hw_id stream, uint32_t *answer, hw_error *error);
    /* Makes a graph executable. */
    int32_t (*instantiate_graph)(hw_backend *backend, hw_id graph, hw_id *answer, hw_error *error);
    /* Enqueues one execution of the graph.
     *  - capture.replay: every launch executes all recorded operations once, in the order of the stream, also those of the
     *    streams that joined, in the order that their events gave.
     *  - capture.by-value: addresses and scalars are those of the time of recording. */
    int32_t (*launch_graph)(hw_backend *backend, hw_id graph, hw_id stream, hw_error *error);
    /* Destroys a graph; graphs made executable from it live on. */
    int32_t (*destroy_graph)(hw_backend *backend, hw_id graph, hw_error *error);
    /* Destroys an executable graph; a launch already enqueued is still executed. */
    int32_t (*destroy_graph_exec)(hw_backend *backend, hw_id graph, hw_error *error);

    /* ---- group ipc: memory and events of other processes
     *  - ipc.offered: offered exactly where the hw_capabilities.ipc_transports of a device are not empty.
     *  - ipc.shared-bytes: what one process writes to the memory the other reads, and the other way round. */
    /* Makes a handle of a whole allocation, by a transport HW_TRANSPORT_... .
     *  - ipc.export-shareable: memory not allocated as HW_DEVICE_MEMORY_SHAREABLE by this transport gives
     *    HW_ERROR_INVALID_ARGUMENT.
     *  - ipc.export-transport: a transport outside the capability hw_capabilities.ipc_transports gives HW_ERROR_UNSUPPORTED. */
    int32_t (*export_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, uint32_t transport, hw_memory_handle *answer, hw_error *error);
    /* Maps memory of another process for the device.
     *  - ipc.open-again: a second open for the same device gives the same address and is counted.
     *  - ipc.open-outlives: with HW_TRANSPORT_DESCRIPTOR the mapping keeps the memory when its exporter has ended.
     *  - ipc.open-checked: a handle that no exporter made, of another device's UUID or without the descriptor that its
     *    transport needs, gives HW_ERROR_INVALID_ARGUMENT, and nothing is mapped. */
    int32_t (*open_memory)(hw_backend *backend, uint32_t device, const hw_memory_handle *memory, uint64_t *answer, hw_error *error);
    /* Undoes one `open_memory`.
     *  - ipc.close-unknown: an address that is not open gives HW_ERROR_INVALID_POINTER. */
    int32_t (*close_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, hw_error *error);
    /* Makes a handle of an event that was made with `interprocess`.
     *  - ipc.export-event: an event made without `interprocess` gives HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*export_event)(hw_backend *backend, hw_id event, hw_event_handle *answer, hw_error *error);
    /* Opens an event of another process; `destroy_event` closes it.
     *  - ipc.event-orders: work that waits for the opened event runs after the other process's work before the record.
     *  - ipc.event-peer-ends: where the fact HW_FACT_EVENT_WAITS_END_WITH_PEER holds, waits end when the recording process
     *    ends before the record is reached. */
    int32_t (*open_event)(hw_backend *backend, uint32_t device, const hw_event_handle *event, hw_id *answer, hw_error *error);
    /* The program has closed the descriptor that came with this `descriptor_token`. */
    int32_t (*release_descriptor)(hw_backend *backend, uint64_t token, hw_error *error);

    /* ---- group reset: restoring a handle that foreign code had */
    /* Puts every setting that the vendor has on a handle back to that of a fresh one; its plans stay. If this fails or is
     * missing, core destroys handles that foreign code had.
     *  - blas.reset: after it, products behave as on a fresh handle with a stream and a workspace bound. */
    int32_t (*handle_reset)(hw_handle *handle, hw_error *error);
};

/* The one symbol of a plugin. `host` lives as long as the process. Null refuses the program. */
const hw_plugin *highwater_plugin(const hw_host *host);

#ifdef __cplusplus
}
#endif

#endif /* HIGHWATER_H */
