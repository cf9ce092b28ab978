/* highwater.h: backends of Highwater as plugins, in C.
 *
 * Generated from the list in highwater-plugin; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A plugin is a shared library that exports one function, highwater_plugin. The program calls it once. The function returns a
 * struct that describes the plugin and gives its table. Through the table, the program opens a backend and uses it.
 *
 * Rules for every function and struct:
 *  - Every function of the table returns 0, or one of HW_ERROR_... with the details in *error. It writes its answer only if it
 *    returns 0.
 *  - Any thread may call a function, and several may call at once. A handle is used by one thread at a time. The program sets no
 *    current device or context. The plugin restores the caller's.
 *  - Every struct that is passed by pointer begins with its size in bytes, which its creator sets. hw_id, hw_location and
 *    hw_gemm_shape are parts of other structs: they have no size and never grow. The missing fields of a shorter struct are
 *    zero. A longer struct must be rejected (HW_ERROR_INVALID_ARGUMENT) if any byte that the reader does not know is not zero.
 *    The writer of an answer writes at most the struct's size, and sets that size to the number of bytes written.
 *  - Structs and the table grow at the end only. A null slot is not supported. Slots are in groups: a table has all of a group
 *    or none.
 *  - Pointers in arguments are valid until the call returns. The contents of hw_plugin are valid for the life of the process.
 *  - No exception and no longjmp may cross the table. HW_PANICKED reports one inside the plugin. The program then never calls
 *    the plugin again.
 *  - The library is never unloaded. No function is called in a forked child, or once the process exits.
 *  - Matrices are column-major. Sizes are in bytes unless the comment states another unit.
 *
 * Clauses are the promises on which the program relies. Each has an id, such as stream.order. The comment of an operation lists
 * the clauses that it must keep. `highwater conformance --plugin FILE` tests every clause, and names those of each failed case.
 * Every operation must keep these:
 *  - backend.ids-checked: a stale, foreign or forged id returns HW_ERROR_INVALID_HANDLE and has no effect.
 *  - backend.device-checked: an ordinal of `device_count` or above returns HW_ERROR_INVALID_ARGUMENT, also in a copy or a
 *    fill of nothing.
 *  - backend.lacking: a call that a capability denies returns HW_ERROR_UNSUPPORTED and has no effect.
 *  - backend.errors: an error has a message, and names the method that returned it. Methods of the host allocator have the
 *    prefix `host_`. A `copy_2d` that copies each row alone may name `copy`.
 *  - backend.concurrent: calls from several threads at once do not disturb each other.
 *  - backend.live-objects: each object counts in `live_objects` from its creation to its destruction.
 *  - backend.destroy-concurrent: any thread can destroy a stream, an event, a graph or an executable graph, also during a
 *    call of another thread that uses it. That call ends as if the object was alive. Later calls return
 *    HW_ERROR_INVALID_HANDLE.
 *  - backend.forked: in a child forked after the backend was opened, calls return HW_ERROR_FORKED at once, whatever their
 *    arguments. A method whose capability is false, or that the kind of a handle lacks, may return HW_ERROR_UNSUPPORTED
 *    instead.
 *  - backend.exiting: once the process has begun to exit, `is_exiting` returns true, and each call that can fail returns
 *    HW_ERROR_SHUTTING_DOWN. Before that, `is_exiting` returns false.
 *  - host.one-allocator: every call returns the same object.
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

/* Results: success; an exception inside the plugin. */
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

/* Numbers for a kind of memory that any code allocated. */
#define HW_RANGE_PLAIN 0u
#define HW_RANGE_MAPPED 1u
#define HW_RANGE_STREAM_ORDERED 2u
#define HW_RANGE_MANAGED 3u

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

/* Slots of ids: those from the first one on are not objects. The default streams have one each, in generation 1. */
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
#define HW_CAN_MAPPED_MEMORY (UINT64_C(1) << 22)
#define HW_CAN_MAPPED_MEMORY_RDMA (UINT64_C(1) << 23)
#define HW_CAN_HOST_REGISTER_READ_ONLY (UINT64_C(1) << 24)
#define HW_CAN_FOREIGN_MEMORY (UINT64_C(1) << 25)

/* Bits of hw_capabilities.facts. */
#define HW_FACT_SET_STREAM_RESETS_WORKSPACE (UINT64_C(1) << 0)
#define HW_FACT_HANDLE_PER_STREAM (UINT64_C(1) << 1)
#define HW_FACT_CREATE_DURING_CAPTURE (UINT64_C(1) << 2)
#define HW_FACT_HOST_ADDRESS_IS_DEVICE_ADDRESS (UINT64_C(1) << 3)
#define HW_FACT_PINNED_CACHED_BY_DEVICE (UINT64_C(1) << 4)
#define HW_FACT_EVENT_WAITS_END_WITH_PEER (UINT64_C(1) << 5)
#define HW_FACT_LT_HANDLE_PER_STREAM (UINT64_C(1) << 6)

/* An open backend, and a BLAS or an Lt handle. Only the plugin knows their contents. */
typedef struct hw_backend hw_backend;
typedef struct hw_handle hw_handle;
typedef struct hw_table hw_table;

/* The id of a stream, an event, a graph, an executable graph or physical memory. The backend issues it, and checks it in
 * every call. A stale, foreign or forged id returns HW_ERROR_INVALID_HANDLE and has no effect. */
typedef struct hw_id {
    /* Index in a table of the backend, below HW_FIRST_NAMED_SLOT; or a default stream, HW_SLOT_... */
    uint32_t slot;
    /* Number of the object at that index, from 1. It increases at each reuse of the index. */
    uint32_t generation;
    /* The tag that the program passed when it opened the backend. */
    uint32_t tag;
    /* Ordinal of the object's device. */
    uint32_t device;
} hw_id;

/* The details of an error. A function that returns another code than 0 fills it. The caller has set `size` and cleared
 * the rest. */
typedef struct hw_error {
    /* Bytes of this struct. */
    uint64_t size;
    /* The vendor's code, if `has_vendor_code` is 1. */
    int64_t vendor_code;
    /* 1 if `vendor_code` is set, else 0. */
    uint32_t has_vendor_code;
    /* Zero. */
    uint32_t reserved;
    /* The fault, and the expected value; UTF-8 with a NUL, and not empty. */
    char message[512];
    /* A remedy, or empty. */
    char hint[256];
} hw_error;

/* Receives a log line: HW_LOG_..., the text, its bytes. Any thread may call it. */
typedef void (*hw_log_call)(uint32_t level, const char *text, uint64_t bytes);

/* The program's offer to a plugin. Valid for the life of the process. */
typedef struct hw_host {
    /* Bytes of this struct. */
    uint64_t size;
    /* Lowest version of the table that the program supports. */
    uint32_t version_min;
    /* Highest version of the table that the program supports. */
    uint32_t version_max;
    /* Receives log lines from any thread. May be null. */
    hw_log_call log;
} hw_host;

/* A request to open a backend. */
typedef struct hw_open {
    /* Bytes of this struct. */
    uint64_t size;
    /* The version of the table that both sides use. */
    uint32_t version;
    /* The tag of every id that this backend issues; not 0. Each open backend has its own. */
    uint32_t tag;
} hw_open;

/* Opens the backend, which has at least one device. If it cannot, it returns the reason: HW_ERROR_LIBRARY_MISSING for a
 * library of the vendor, HW_ERROR_SYMBOL_MISSING for a function in it, HW_ERROR_DEVICE_MISSING if there is no device. The
 * program reports the reason, and tries other backends unless the user named this one. */
typedef int32_t (*hw_open_call)(const hw_open *request, hw_backend **backend, hw_error *error);
/* Returns the table of a version, which is one of the plugin's versions. */
typedef const hw_table *(*hw_table_call)(uint32_t version);

/* The description of a plugin. Valid and unchanged for the life of the process. The texts are UTF-8 with a NUL. */
typedef struct hw_plugin {
    /* Bytes of this struct. */
    uint64_t size;
    /* Lowest version of the table that the plugin supports. */
    uint32_t version_min;
    /* Highest version of the table that the plugin supports. */
    uint32_t version_max;
    /* The name that opens it: at most 63 letters, digits, `-` and `_`. */
    const char *name;
    /* The product that it drives, for people. */
    const char *description;
    /* Its maker. */
    const char *vendor;
    /* Its own version. */
    const char *version;
    /* Opens the backend. Each call opens another one. */
    hw_open_call open;
    /* Returns the table of a version. */
    hw_table_call table;
} hw_plugin;

/* The name and the versions of a backend. */
typedef struct hw_identity {
    /* Bytes of this struct. */
    uint64_t size;
    /* 1 if the backend drives real hardware, else 0. */
    uint32_t real_device;
    /* Zero. */
    uint32_t reserved;
    /* The name that opens it. */
    char name[64];
    /* The product that it drives, for people. */
    char description[256];
    /* Versions of the backend and of each vendor library: a line `what<TAB>version` for each. */
    char versions[2048];
    /* Environment variables that size the BLAS workspace as `:KiB:COUNT` pairs: one on a line, the first one set counts. */
    char blas_workspace_variables[512];
    /* Environment variables that size the Lt workspace in KiB: one on a line, the first one set counts. */
    char lt_workspace_variables[512];
} hw_identity;

/* A description of one device. */
typedef struct hw_device_info {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes of memory. */
    uint64_t memory_bytes;
    /* Ordinal within this process. */
    uint32_t ordinal;
    /* NUMA node, if `has_numa_node` is 1. */
    uint32_t numa_node;
    /* 1 if the NUMA node is known, else 0. */
    uint32_t has_numa_node;
    /* Zero. */
    uint32_t reserved;
    /* The id that names the device in every process, stable over the life of the machine. */
    uint8_t uuid[16];
    /* The vendor's name of the device. */
    char name[256];
    /* PCI address as `domain:bus:device.function`, or empty. */
    char pci_address[32];
    /* The vendor's architecture: `sm_90`, `gfx942`. */
    char architecture[64];
} hw_device_info;

/* The abilities of a device, and the facts about its behavior. */
typedef struct hw_capabilities {
    /* Bytes of this struct. */
    uint64_t size;
    /* Abilities: HW_CAN_... . A program ignores unknown bits. */
    uint64_t abilities;
    /* Facts: HW_FACT_... . */
    uint64_t facts;
    /* Transports that share its memory: 1 shifted left by HW_TRANSPORT_..., for each. */
    uint32_t ipc_transports;
    /* Zero. */
    uint32_t reserved;
    /* Bytes of one registration, when the program makes large blocks of page-locked memory itself; 0: never. */
    uint64_t register_piece_bytes;
    /* Alignment in bytes of a BLAS workspace; a power of two. */
    uint64_t workspace_alignment;
    /* Bytes of workspace at which a BLAS handle is fastest. */
    uint64_t blas_workspace_bytes;
    /* Bytes of workspace that an Lt plan may use by default. */
    uint64_t lt_workspace_bytes;
    /* Bytes of which sizes and addresses of mapped memory are multiples, with HW_CAN_MAPPED_MEMORY; else 0. */
    uint64_t mapped_memory_granularity;
} hw_capabilities;

/* Free and total memory of a device, in bytes. */
typedef struct hw_memory_info {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes that can be allocated now. */
    uint64_t free;
    /* Bytes of the device's memory. */
    uint64_t total;
} hw_memory_info;

/* A range of device memory that any code of the process allocated. */
typedef struct hw_memory_range {
    /* Bytes of this struct. */
    uint64_t size;
    /* First byte. */
    uint64_t base;
    /* Number of bytes: of the whole block, or of one mapping. */
    uint64_t bytes;
    /* HW_RANGE_... . */
    uint32_t kind;
    /* Transports by which `export_memory` may export the start of the range: 1 shifted left by HW_TRANSPORT_..., for each. */
    uint32_t transports;
} hw_memory_range;

/* Counts of the objects of a backend that are alive. All are zero once everything was destroyed. */
typedef struct hw_live_objects {
    /* Bytes of this struct. */
    uint64_t size;
    /* Streams that `create_stream` made. */
    uint64_t streams;
    /* Events that `create_event` made or `open_event` opened. */
    uint64_t events;
    /* BLAS and Lt handles. */
    uint64_t handles;
    /* Blocks of device memory. */
    uint64_t allocations;
    /* Blocks of page-locked host memory, allocated or registered. */
    uint64_t host_allocations;
    /* Graphs and executable graphs. */
    uint64_t graphs;
    /* Mappings of other processes' memory. */
    uint64_t mappings;
    /* File descriptors that sharing made. */
    uint64_t descriptors;
    /* Shared files that sharing made. */
    uint64_t shared_files;
    /* Ranges of addresses that `reserve_addresses` returned. */
    uint64_t reservations;
    /* Physical memory that `create_memory` made, until `destroy_memory`. */
    uint64_t physical_memory;
} hw_live_objects;

/* Options of a stream. */
typedef struct hw_stream_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* HW_STREAM_PRIORITY_... . */
    uint32_t priority;
    /* Zero. */
    uint32_t reserved;
} hw_stream_options;

/* Options of an event. */
typedef struct hw_event_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* 1 to allow `event_elapsed_ns`, else 0. */
    uint32_t timing;
    /* 1 to let another process open the event, else 0. */
    uint32_t interprocess;
} hw_event_options;

/* Options of an allocation of device memory. */
typedef struct hw_allocate_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes to allocate. With 0, the call returns HW_ERROR_INVALID_ARGUMENT. */
    uint64_t bytes;
    /* HW_DEVICE_MEMORY_... . */
    uint32_t kind;
    /* HW_TRANSPORT_..., for HW_DEVICE_MEMORY_SHAREABLE; else 0. */
    uint32_t transport;
    /* The stream, for HW_DEVICE_MEMORY_STREAM_ORDERED; else zeros. */
    hw_id stream;
} hw_allocate_options;

/* Options of page-locked memory. */
typedef struct hw_host_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* HW_HOST_MEMORY_... . */
    uint32_t kind;
    /* Zero. */
    uint32_t reserved;
    /* 1 if `host_register` gets memory that the CPU may only read; else 0. `host_allocate` ignores it. */
    uint32_t read_only;
    /* Zero. */
    uint32_t reserved_2;
} hw_host_options;

/* One side of a copy. */
typedef struct hw_location {
    /* HW_LOCATION_... . */
    uint32_t kind;
    /* Ordinal of the device, for HW_LOCATION_DEVICE; else 0. */
    uint32_t device;
    /* Address in that memory. */
    uint64_t address;
} hw_location;

/* A copy of bytes. Its two sides do not overlap. */
typedef struct hw_memory_copy {
    /* Bytes of this struct. */
    uint64_t size;
    /* Destination. */
    hw_location dst;
    /* Source. */
    hw_location src;
    /* Bytes to copy. With 0, the call succeeds and copies nothing. */
    uint64_t bytes;
} hw_memory_copy;

/* A copy of rows. No row of one side overlaps a row of the other. */
typedef struct hw_memory_copy_2d {
    /* Bytes of this struct. */
    uint64_t size;
    /* The first row of the destination. */
    hw_location dst;
    /* The first row of the source. */
    hw_location src;
    /* Bytes of each row. With 0, the call succeeds and copies nothing. */
    uint64_t width;
    /* Number of rows. With 0, the call succeeds and copies nothing. */
    uint64_t height;
    /* Bytes from the beginning of one row to that of the next in the source. */
    uint64_t src_pitch;
    /* The same in the destination. */
    uint64_t dst_pitch;
} hw_memory_copy_2d;

/* A fill of device memory with one element. */
typedef struct hw_memory_fill {
    /* Bytes of this struct. */
    uint64_t size;
    /* First byte; a multiple of the element's size. */
    uint64_t dst;
    /* Number of elements. With 0, the call succeeds and writes nothing. */
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
    /* 1 if op(A) is A transposed, else 0. */
    uint32_t transpose_a;
    /* 1 if op(B) is B transposed, else 0. */
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
    /* 1 for a batch of products at equal strides, else 0. */
    uint32_t has_batch;
    /* Zero. */
    uint32_t reserved;
    /* Number of products, if `has_batch` is 1. */
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
    /* Factor of the old C. With 0, the old C is not read. */
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
    /* 1 for this memory, 0 for the handle's own. */
    uint32_t present;
    /* Zero. */
    uint32_t reserved;
} hw_workspace;

/* Options of an Lt plan. */
typedef struct hw_plan_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* Sizes, leading dimensions, batch. */
    hw_gemm_shape shape;
    /* Bytes of workspace that the plan may use. */
    uint64_t workspace_bytes;
    /* Alignment in bytes of every operand's address. */
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
    /* Factor of C. With 0, C is not read. */
    double beta;
    /* First element of A. */
    uint64_t a;
    /* First element of B. */
    uint64_t b;
    /* First element of C. */
    uint64_t c;
    /* First element of D, which has the layout of C. */
    uint64_t d;
    /* First element of the bias, if `has_bias` is 1. */
    uint64_t bias;
    /* 1 if there is a bias, else 0. */
    uint32_t has_bias;
    /* Zero. */
    uint32_t reserved;
} hw_plan_arguments;

/* Options of physical memory. */
typedef struct hw_physical_memory_options {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes of memory; a multiple of hw_capabilities.mapped_memory_granularity, and not 0. */
    uint64_t bytes;
    /* 1 if other processes can open the memory, else 0. */
    uint32_t shareable;
    /* HW_TRANSPORT_..., if `shareable` is 1; else 0. */
    uint32_t transport;
    /* 1 if other devices of the machine, such as network adapters, may access the memory directly, else 0. */
    uint32_t rdma;
    /* Zero. */
    uint32_t reserved;
} hw_physical_memory_options;

/* A handle of device memory for other processes. */
typedef struct hw_memory_handle {
    /* Bytes of this struct. */
    uint64_t size;
    /* Bytes of the whole allocation. */
    uint64_t bytes;
    /* HW_TRANSPORT_... . */
    uint32_t transport;
    /* A file descriptor that is sent with the payload, or -1. In an answer, the program owns it and closes it. In an
     * argument, the program keeps it, and the plugin must not close it. */
    int32_t descriptor;
    /* UUID of the device that owns the memory. */
    uint8_t device_uuid[16];
    /* The vendor's handle. */
    uint8_t payload[64];
    /* In an answer with a descriptor: the argument of `release_descriptor`, which the program calls once it has closed
     * the descriptor; 0 for no call. */
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

    /* ---- group required: the operations of every backend */
    /* Closes the backend. Called once, as the last call of the backend, but never once the process exits. */
    int32_t (*close)(hw_backend *backend, hw_error *error);
    /* Returns the name and the versions of the backend, the same in every call.
     *  - identity.stable: every call returns the same value.
     *  - identity.tagged: every id that the backend issues carries hw_open.tag. */
    int32_t (*identity)(hw_backend *backend, hw_identity *answer, hw_error *error);
    /* Returns the number of devices, which is at least 1 and never changes. Their ordinals count from 0.
     *  - devices.some: the number is at least 1 (a backend without a device does not open). */
    int32_t (*device_count)(hw_backend *backend, uint32_t *answer, hw_error *error);
    /* Returns the description of a device.
     *  - devices.uuid: the UUID is stable over the life of the machine, and no two devices share one. */
    int32_t (*device_info)(hw_backend *backend, uint32_t device, hw_device_info *answer, hw_error *error);
    /* Returns the abilities and facts of a device, the same in every call. Called once.
     *  - devices.capabilities-stable: every call returns the same value. */
    int32_t (*capabilities)(hw_backend *backend, uint32_t device, hw_capabilities *answer, hw_error *error);
    /* Returns the free and the total memory.
     *  - memory.info: `free <= total`, and `total` is hw_device_info.memory_bytes.
     *  - memory.info-counts: `free` is at most `total` less the bytes of all live blocks of `allocate` and all live physical
     *    memory.
     *  - memory.info-returns: a block of 64 MiB or more that is not stream-ordered, and physical memory of that size, is free
     *    when the call that gives it back returns, unless another user of the device takes it. */
    int32_t (*memory_info)(hw_backend *backend, uint32_t device, hw_memory_info *answer, hw_error *error);
    /* Returns the number of live objects of each kind, by the backend's own count. */
    int32_t (*live_objects)(hw_backend *backend, hw_live_objects *answer, hw_error *error);
    /* Returns 1 once the backend knows that the process has begun to exit, else 0. The program also checks this itself. */
    int32_t (*is_exiting)(hw_backend *backend, uint32_t *answer, hw_error *error);
    /* Creates a stream.
     *  - stream.order: the work of one stream is executed in the order of the calls that enqueued it.
     *  - stream.asynchronous: a call that enqueues work returns without waiting for earlier work. It may wait while 1,000
     *    operations or more of its stream are outstanding, because queues of vendors are full then.
     *  - stream.enqueues: a call that enqueues work leaves its execution to the device, also on an idle stream. If the work
     *    takes long, the call returns while the work is outstanding.
     *  - stream.independent: work of one stream waits for work of another stream of the device only through
     *    `stream_wait_event`, while at most 8 streams of the device have outstanding work. Beyond that, streams may share a
     *    queue of the device, and work waits for earlier work in its queue. The two default streams of a device may wait for
     *    each other. A copy between host and device may wait for earlier copies of its direction, because they may share an
     *    engine. */
    int32_t (*create_stream)(hw_backend *backend, uint32_t device, const hw_stream_options *options, hw_id *answer, hw_error *error);
    /* Destroys a stream without waiting. Its work is still executed.
     *  - stream.destroy-pending: work that was enqueued before is still executed.
     *  - event.outlives-stream: queries, waits and records of an event that was recorded on the stream work as before.
     *  - stream.destroy-stale: the id is stale afterwards, also for a second `destroy_stream`. */
    int32_t (*destroy_stream)(hw_backend *backend, hw_id stream, hw_error *error);
    /* Returns HW_COMPLETE if all work enqueued so far has been executed, else HW_PENDING. Does not wait.
     *  - stream.query: HW_PENDING while work is outstanding, HW_COMPLETE after it. A wait for an event is outstanding work
     *    until the event is reached. */
    int32_t (*query_stream)(hw_backend *backend, hw_id stream, uint32_t *answer, hw_error *error);
    /* Waits until all work enqueued so far has been executed.
     *  - stream.synchronize: on return, the effects of that work are visible to the CPU.
     *  - stream.synchronize-ends: the call returns once that work is done, also while another thread goes on enqueueing. */
    int32_t (*synchronize_stream)(hw_backend *backend, hw_id stream, hw_error *error);
    /* Waits for every stream of the device.
     *  - devices.synchronize: on return, that work has been executed.
     *  - devices.synchronize-ends: the call returns once that work is done, also while other threads go on enqueueing. */
    int32_t (*synchronize_device)(hw_backend *backend, uint32_t device, hw_error *error);
    /* Makes the stream wait, on the device, for the event's latest record at the time of the call.
     *  - event.wait-orders: work enqueued after the wait runs after the work before the record, also across devices.
     *  - event.wait-snapshot: the stream does not wait for a record made after the call, also if the event is recorded again
     *    before the stream gets to the wait.
     *  - event.never-recorded: a wait for an event that was never recorded succeeds and has no effect. */
    int32_t (*stream_wait_event)(hw_backend *backend, hw_id stream, hw_id event, hw_error *error);
    /* Creates an event. Timing and sharing at once return HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*create_event)(hw_backend *backend, uint32_t device, const hw_event_options *options, hw_id *answer, hw_error *error);
    /* Destroys an event without waiting.
     *  - event.destroy-pending: a record or a wait that was enqueued before keeps its effect, also in a capture.
     *  - event.destroy-stale: the id is stale afterwards. */
    int32_t (*destroy_event)(hw_backend *backend, hw_id event, hw_error *error);
    /* Records the event at the stream's current point. Replaces an earlier record.
     *  - event.record-moves: after a further record, queries and waits refer to it alone. Waits that were enqueued before
     *    keep the earlier record. An event for other processes may be pending until the earlier record is reached too.
     *  - event.record-device: a stream of another device than the event's returns HW_ERROR_WRONG_DEVICE. */
    int32_t (*record_event)(hw_backend *backend, hw_id event, hw_id stream, hw_error *error);
    /* Returns HW_COMPLETE if the stream has reached the latest record or if there is none, else HW_PENDING.
     *  - event.query: HW_PENDING until the stream has passed the record, then HW_COMPLETE.
     *  - event.query-never-recorded: HW_COMPLETE for an event that was never recorded. */
    int32_t (*query_event)(hw_backend *backend, hw_id event, uint32_t *answer, hw_error *error);
    /* Waits until the stream has reached the latest record.
     *  - event.synchronize: on return, the effects of the work before the record are visible to the CPU. */
    int32_t (*synchronize_event)(hw_backend *backend, hw_id event, hw_error *error);
    /* Allocates device memory with unspecified contents, at a multiple of 256.
     *  - memory.aligned: the address is a multiple of 256.
     *  - memory.disjoint: blocks that are alive do not overlap.
     *  - memory.zero: 0 bytes return HW_ERROR_INVALID_ARGUMENT.
     *  - memory.exhausted: a request for more than is available returns HW_ERROR_OUT_OF_MEMORY and changes nothing.
     *  - memory.stream-ordered: work enqueued on a block's stream after the allocation has exclusive use of the bytes, and so
     *    has work that waits for an event recorded there after it. */
    int32_t (*allocate)(hw_backend *backend, uint32_t device, const hw_allocate_options *options, uint64_t *answer, hw_error *error);
    /* Frees a block. Stream-ordered memory is freed in the order of `stream`. Other memory takes a `stream` of zeros.
     *  - memory.free-returns: freed bytes can be allocated again; stream-ordered bytes, once the stream has passed the free. */
    int32_t (*free)(hw_backend *backend, uint32_t device, uint64_t ptr, hw_id stream, hw_error *error);
    /* Enqueues a copy from or to device memory. The other side is device memory or page-locked host memory.
     *  - copy.exact: exactly `bytes` bytes arrive, unchanged; bytes beside the destination keep their value.
     *  - copy.ordered: the copy runs in the order of the stream.
     *  - copy.zero: a copy of 0 bytes succeeds and copies nothing. Its addresses need not lie in a block, and may be null. */
    int32_t (*copy)(hw_backend *backend, const hw_memory_copy *copy, hw_id stream, hw_error *error);
    /* Enqueues a fill of device memory.
     *  - fill.exact: exactly `count` elements are written, with each width of pattern.
     *  - fill.ordered: the fill runs in the order of the stream.
     *  - fill.zero: a fill of 0 elements succeeds and writes nothing. Its address need not lie in a block, and may be null. */
    int32_t (*fill)(hw_backend *backend, const hw_memory_fill *fill, hw_id stream, hw_error *error);

    /* ---- group timing: elapsed time between events */
    /* Returns the nanoseconds between the records of two events with timing.
     *  - event.elapsed: the result is at least the time that the device spent between the records, up to the vendor's
     *    rounding. The order of the calls does not matter.
     *  - event.elapsed-order: if the device reached the record of `end` first, the result is 0.
     *  - event.elapsed-invalid: an event without timing or without a record returns HW_ERROR_INVALID_ARGUMENT; a record that
     *    is not reached yet returns HW_ERROR_INVALID_STATE. */
    int32_t (*event_elapsed_ns)(hw_backend *backend, hw_id start, hw_id end, uint64_t *answer, hw_error *error);

    /* ---- group foreign: raw handles of streams and events, to and from other code */
    /* Returns the vendor's handle of the stream as a number. */
    int32_t (*raw_stream)(hw_backend *backend, hw_id stream, uint64_t *answer, hw_error *error);
    /* Wraps a stream that other code made and owns. `destroy_stream` forgets it.
     *  - stream.foreign-kept: when the id is destroyed, the stream, its outstanding work and its other ids stay as they are. */
    int32_t (*stream_from_raw)(hw_backend *backend, uint32_t device, uint64_t raw, hw_id *answer, hw_error *error);
    /* Returns the vendor's handle of the event as a number. */
    int32_t (*raw_event)(hw_backend *backend, hw_id event, uint64_t *answer, hw_error *error);
    /* Wraps an event that other code made and owns. `destroy_event` forgets it.
     *  - event.foreign-kept: when the id is destroyed, the event, its record, the waits for it and its other ids stay as they
     *    are. */
    int32_t (*event_from_raw)(hw_backend *backend, uint32_t device, uint64_t raw, hw_id *answer, hw_error *error);

    /* ---- group host: page-locked host memory */
    /* Allocates page-locked memory with unspecified contents, at a multiple of 64.
     *  - host.usable: the CPU can read and write every byte, and every device can copy to and from it.
     *  - host.aligned: the address is a multiple of 64.
     *  - host.zero: 0 bytes return HW_ERROR_INVALID_ARGUMENT.
     *  - host.exhausted: a request for more than is available returns HW_ERROR_OUT_OF_MEMORY and changes nothing. */
    int32_t (*host_allocate)(hw_backend *backend, uint64_t bytes, const hw_host_options *options, void **answer, hw_error *error);
    /* Frees page-locked memory.
     *  - host.free-counts: hw_live_objects.host_allocations decreases by one. */
    int32_t (*host_free)(hw_backend *backend, void *ptr, hw_error *error);
    /* Returns the address of page-locked memory on the device.
     *  - host.device-address: it is the CPU's address if the fact HW_FACT_HOST_ADDRESS_IS_DEVICE_ADDRESS holds. */
    int32_t (*host_device_address)(hw_backend *backend, void *ptr, uint32_t device, uint64_t *answer, hw_error *error);

    /* ---- group register: page-locking of memory that other code allocated */
    /* Page-locks memory that other code allocated.
     *  - host.register-copies: inside one registration, copies work as with allocated memory, from its first byte to its
     *    last; a copy that crosses into an adjacent registration need not work.
     *  - host.register-overlap: a range that overlaps a registered one or a block of `host_allocate` returns
     *    HW_ERROR_INVALID_ARGUMENT, and nothing changes.
     *  - host.register-apart: ranges that do not overlap can be registered, also adjacent ones and several in one page. Each
     *    works until its own `host_unregister`, whatever becomes of the others.
     *  - host.register-read-only: with `read_only`, the range need not be writable; copies from it work as from other
     *    registered memory, and another mapping of the same pages stays the same memory. */
    int32_t (*host_register)(hw_backend *backend, void *ptr, uint64_t bytes, const hw_host_options *options, hw_error *error);
    /* Undoes `host_register`.
     *  - host.unregister-unknown: an address that was not passed to `host_register` returns HW_ERROR_INVALID_POINTER. */
    int32_t (*host_unregister)(hw_backend *backend, void *ptr, hw_error *error);

    /* ---- group blas: BLAS and Lt handles
     *  - blas.kind: a call of the other kind (a product on HW_BLAS_KIND_LT, a plan on HW_BLAS_KIND_BLAS) returns
     *    HW_ERROR_UNSUPPORTED. */
    /* Creates a handle of a kind, HW_BLAS_KIND_... . One thread at a time uses it.
     *  - blas.create-concurrent: creating one handle does not delay calls on other handles, streams or devices. */
    int32_t (*create_handle)(hw_backend *backend, uint32_t device, uint32_t kind, hw_handle **answer, hw_error *error);
    /* Binds the stream of later products.
     *  - blas.stream-bound: products run in the order of the bound stream.
     *  - blas.unbound: until a stream is bound, products and runs of plans return HW_ERROR_INVALID_STATE, and nothing is
     *    enqueued. A product without elements may succeed.
     *  - blas.stream-device: a stream of another device returns HW_ERROR_WRONG_DEVICE.
     *  - blas.stream-destroyed: once the bound id is destroyed, even if it names a foreign stream, products and runs of plans
     *    return HW_ERROR_INVALID_HANDLE, and nothing is enqueued. A product without elements may succeed. Those enqueued
     *    before are still executed.
     *  - blas.stream-resets-workspace: if the fact HW_FACT_SET_STREAM_RESETS_WORKSPACE holds, the handle returns to its own
     *    workspace, even if the stream is the same; modes survive. */
    int32_t (*handle_set_stream)(hw_handle *handle, hw_id stream, hw_error *error);
    /* Binds the memory for intermediate results, or the handle's own.
     *  - blas.workspace-used: products keep their intermediate results in the bound workspace.
     *  - blas.workspace-alignment: an address that is not a multiple of hw_capabilities.workspace_alignment returns
     *    HW_ERROR_INVALID_ARGUMENT, and the workspace before it stays bound. */
    int32_t (*handle_set_workspace)(hw_handle *handle, const hw_workspace *workspace, hw_error *error);
    /* Sets the precision of 32-bit products: HW_MATH_MODE_... . */
    int32_t (*handle_set_math_mode)(hw_handle *handle, uint32_t mode, hw_error *error);
    /* Sets the use of atomics in kernels: HW_ATOMICS_MODE_... .
     *  - blas.deterministic: with HW_ATOMICS_MODE_NOT_ALLOWED, equal calls compute equal bits. */
    int32_t (*handle_set_atomics_mode)(hw_handle *handle, uint32_t mode, hw_error *error);
    /* Enqueues `C = alpha * op(A) * op(B) + beta * C` on the bound stream. The program has checked sizes, leading
     * dimensions and strides: every element is inside the address space, and no two products of a batch share one.
     *  - gemm.value: every element of C is the product within the rounding of C's type. Before it is added to `beta * C`, the
     *    product may be rounded to that type. NaN and infinity in A, B and C reach exactly the elements that they enter.
     *  - gemm.infinite-factors: with an infinite or NaN beta, or such an alpha and a k above 0, every element of C is
     *    infinite or NaN.
     *  - gemm.transpose: this holds for each combination of transposed factors.
     *  - gemm.leading-dimension: elements between the rows of C and the leading dimension keep their value.
     *  - gemm.beta: the old C enters with factor beta.
     *  - gemm.beta-zero: with beta 0 or -0, the old C is not read (NaN in it has no effect).
     *  - gemm.alpha-zero: with alpha 0 or -0, or k 0, A and B have no effect.
     *  - gemm.empty: with m, n or the batch 0, the call succeeds and writes nothing.
     *  - gemm.strided-batch: the products of a batch are independent and use the given strides.
     *  - gemm.mixed: with factors of HW_DATA_TYPE_F16 or HW_DATA_TYPE_BF16 and an output of HW_DATA_TYPE_F32, C is an
     *    HW_DATA_TYPE_F32 matrix: its old values enter and the product is stored without rounding to the factors' type; the
     *    sum is kept in 32 bits, and every other clause about C holds. Needs HW_CAN_GEMM_MIXED.
     *  - gemm.mixed-pairs: every other pair of different types returns HW_ERROR_UNSUPPORTED, as a GEMM and as a plan, and
     *    writes nothing.
     *  - gemm.asynchronous: the call returns without waiting for the product. */
    int32_t (*handle_gemm)(hw_handle *handle, const hw_gemm *gemm, hw_error *error);
    /* Returns the vendor's handle as a number. */
    int32_t (*handle_raw)(hw_handle *handle, uint64_t *answer, hw_error *error);
    /* Destroys the vendor's handle. Later calls except `handle_close` return HW_ERROR_INVALID_HANDLE.
     *  - blas.destroyed: hw_live_objects.handles decreases by one, also if a handle is dropped without this call.
     *  - blas.destroy-pending: products and runs of plans that were enqueued before are still executed, with the workspace
     *    that was bound then. The same holds for a handle that is dropped. */
    int32_t (*handle_destroy)(hw_handle *handle, hw_error *error);
    /* Closes the handle, and destroys the vendor's if it still exists. Called once, as the last call of the handle. */
    int32_t (*handle_close)(hw_handle *handle, hw_error *error);

    /* ---- group lt: Lt plans */
    /* Creates a plan, which belongs to the handle. */
    int32_t (*create_plan)(hw_handle *handle, const hw_plan_options *options, uint64_t *answer, hw_error *error);
    /* Enqueues one run of a plan on the bound stream, with the bound workspace.
     *  - plan.value: D is `epilogue(alpha * op(A) * op(B) + beta * C)` within the rounding of D's type. Before an epilogue,
     *    `alpha * op(A) * op(B)` and its sum with C may be rounded to that type.
     *  - plan.epilogue: this holds for each epilogue; the bias is added to every column.
     *  - plan.alpha-zero: with alpha 0 or -0, or k 0, A and B have no effect: D is `epilogue(beta * C)`, with the bias that
     *    the epilogue adds.
     *  - plan.mixed: as `gemm.mixed`; C, D and the bias have the output's type, and no intermediate sum is rounded to the
     *    factors' type.
     *  - plan.stale: a destroyed or unknown plan returns HW_ERROR_INVALID_HANDLE.
     *  - plan.alignment: an operand that is not aligned to the plan's alignment, or to its own elements, returns
     *    HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*run_plan)(hw_handle *handle, uint64_t plan, const hw_plan_arguments *arguments, hw_error *error);
    /* Destroys a plan.
     *  - plan.destroy-pending: runs that were enqueued before are still executed. */
    int32_t (*destroy_plan)(hw_handle *handle, uint64_t plan, hw_error *error);

    /* ---- group capture: stream capture and replay */
    /* Starts to record the work of the stream instead of executing it, in a mode HW_CAPTURE_... .
     *  - capture.not-executed: no work enqueued during the capture is executed.
     *  - capture.begin-again: a stream that takes part in a capture already returns HW_ERROR_CAPTURE.
     *  - capture.joins: a stream that waits for an event recorded in the capture takes part in it from there on.
     *  - capture.several: streams may be in separate captures at once, in every mode, also if one thread began them. Each
     *    graph has the work of its own capture. The captures may end in any order.
     *  - capture.any-thread: the work of every thread on the stream is recorded. In mode HW_CAPTURE_RELAXED, every thread may
     *    end the capture.
     *  - capture.undisturbed: these calls neither fail nor disturb the capture, from any thread and in any mode: allocating
     *    and freeing plain memory, page-locked memory, and stream-ordered memory on streams that take no part; registering
     *    and unregistering memory; exporting, opening and closing memory that processes share; creating and destroying
     *    events; querying and waiting for streams that take no part; querying and waiting for events recorded outside, also
     *    on a stream that took part later; waits of streams that take no part for such events; instantiating other graphs,
     *    launching them on streams that take no part, and destroying them; creating handles (if HW_FACT_CREATE_DURING_CAPTURE
     *    holds).
     *  - capture.no-answer: a query of, or a wait for, a stream that takes part or an event recorded in the capture returns
     *    HW_ERROR_CAPTURE, and may lose the capture. */
    int32_t (*begin_capture)(hw_backend *backend, hw_id stream, uint32_t mode, hw_error *error);
    /* Ends the capture and returns the recorded graph.
     *  - capture.lost: a capture that was lost returns HW_ERROR_CAPTURE; afterwards the stream works as before.
     *  - capture.unjoined: if the first stream did not wait for work that a stream recorded after it joined, the call returns
     *    HW_ERROR_CAPTURE, and the capture is lost. A stream that joined and recorded nothing may have the same effect, or
     *    none.
     *  - capture.end-without: a stream without a capture returns HW_ERROR_CAPTURE, and nothing changes. */
    int32_t (*end_capture)(hw_backend *backend, hw_id stream, hw_id *answer, hw_error *error);
    /* Returns 1 if the stream takes part in a capture, else 0. */
    int32_t (*is_capturing)(hw_backend *backend, hw_id stream, uint32_t *answer, hw_error *error);
    /* Makes an executable graph from a graph. */
    int32_t (*instantiate_graph)(hw_backend *backend, hw_id graph, hw_id *answer, hw_error *error);
    /* Enqueues one execution of the graph.
     *  - capture.replay: each launch executes all recorded operations once, in the order of the stream, including those of
     *    the streams that joined, in the order that their events set.
     *  - capture.by-value: addresses and scalars are those of the time of recording. */
    int32_t (*launch_graph)(hw_backend *backend, hw_id graph, hw_id stream, hw_error *error);
    /* Destroys a graph.
     *  - capture.destroy-graph: executable graphs made from it stay alive. */
    int32_t (*destroy_graph)(hw_backend *backend, hw_id graph, hw_error *error);
    /* Destroys an executable graph.
     *  - capture.destroy-executable: a launch that was enqueued before is still executed. */
    int32_t (*destroy_graph_exec)(hw_backend *backend, hw_id graph, hw_error *error);

    /* ---- group ipc: memory and events of other processes
     *  - ipc.offered: sharing is offered if and only if the hw_capabilities.ipc_transports of a device are not empty. Every
     *    call returns the same object.
     *  - ipc.shared-bytes: each process reads the bytes that the other writes to the memory. */
    /* Returns a handle of a whole allocation, for a transport HW_TRANSPORT_... .
     *  - ipc.export-shareable: memory that was not made shareable by this transport returns HW_ERROR_INVALID_ARGUMENT.
     *  - ipc.export-transport: a transport outside the capability hw_capabilities.ipc_transports returns
     *    HW_ERROR_UNSUPPORTED.
     *  - ipc.descriptor-keeps: with HW_TRANSPORT_DESCRIPTOR, the descriptor keeps the memory. Each process that receives the
     *    handle can open the memory after its exporter has ended.
     *  - ipc.free-keeps: with HW_TRANSPORT_DESCRIPTOR, memory that its exporter frees, or destroys and unmaps, keeps its
     *    bytes for each process that has it open or has its handle. No other allocation gets the bytes until the last mapping
     *    and the last descriptor have ended. */
    int32_t (*export_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, uint32_t transport, hw_memory_handle *answer, hw_error *error);
    /* Maps memory of another process for the device.
     *  - ipc.open-again: a second open for the same device returns the same address and is counted.
     *  - ipc.open-outlives: with HW_TRANSPORT_DESCRIPTOR, the mapping keeps the memory after its exporter has ended.
     *  - ipc.open-checked: a handle that no exporter made, of another device's UUID or without the descriptor that its
     *    transport needs, returns HW_ERROR_INVALID_ARGUMENT, and nothing is mapped. */
    int32_t (*open_memory)(hw_backend *backend, uint32_t device, const hw_memory_handle *memory, uint64_t *answer, hw_error *error);
    /* Undoes one `open_memory`.
     *  - ipc.close-unknown: an address that is not open returns HW_ERROR_INVALID_POINTER. */
    int32_t (*close_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, hw_error *error);
    /* Returns a handle of an event that was created with `interprocess`.
     *  - ipc.export-event: an event created without `interprocess` returns HW_ERROR_INVALID_ARGUMENT. */
    int32_t (*export_event)(hw_backend *backend, hw_id event, hw_event_handle *answer, hw_error *error);
    /* Opens an event of another process. `destroy_event` closes it.
     *  - ipc.event-orders: work that waits for the opened event runs after the other process's work before the record.
     *  - ipc.event-peer-ends: if the fact HW_FACT_EVENT_WAITS_END_WITH_PEER holds, waits end when the recording process ends
     *    before the record is reached. */
    int32_t (*open_event)(hw_backend *backend, uint32_t device, const hw_event_handle *event, hw_id *answer, hw_error *error);
    /* Reports that the program has closed the descriptor that came with this `descriptor_token`. */
    int32_t (*release_descriptor)(hw_backend *backend, uint64_t token, hw_error *error);

    /* ---- group reset: restoring a handle that foreign code has used */
    /* Restores every vendor setting of the handle to its value on a fresh handle. Its plans stay. If this fails or is
     * missing, core destroys handles that foreign code has used.
     *  - blas.reset: afterwards, products behave as on a fresh handle with a stream and a workspace bound. */
    int32_t (*handle_reset)(hw_handle *handle, hw_error *error);

    /* ---- group mapped: physical memory that is mapped at reserved addresses */
    /* Reserves addresses of a device, at which physical memory can be mapped. Memory that is mapped without a gap and
     * that the device may access is one block for every other operation.
     *  - mapped.reserve: the address is a multiple of hw_capabilities.mapped_memory_granularity, and the range overlaps
     *    neither a live block nor another range.
     *  - mapped.sizes: 0 bytes, and bytes that are no multiple of hw_capabilities.mapped_memory_granularity, return
     *    HW_ERROR_INVALID_ARGUMENT, also from `create_memory`. */
    int32_t (*reserve_addresses)(hw_backend *backend, uint32_t device, uint64_t bytes, uint64_t *answer, hw_error *error);
    /* Gives a range of `reserve_addresses` back.
     *  - mapped.free-checked: a range that is not reserved with this start and these bytes, or in which memory is mapped,
     *    returns HW_ERROR_INVALID_POINTER, and nothing changes. */
    int32_t (*free_addresses)(hw_backend *backend, uint32_t device, uint64_t ptr, uint64_t bytes, hw_error *error);
    /* Creates physical memory of a device. It has no address until it is mapped.
     *  - mapped.exhausted: a request for more than is available returns HW_ERROR_OUT_OF_MEMORY and changes nothing.
     *  - mapped.shared: for memory with a transport in `shareable`, `export_memory` takes the address at which the memory is
     *    mapped, and returns a handle of all of it.
     *  - mapped.transports: a transport outside hw_capabilities.ipc_transports, and HW_TRANSPORT_LEGACY, return
     *    HW_ERROR_UNSUPPORTED. */
    int32_t (*create_memory)(hw_backend *backend, uint32_t device, const hw_physical_memory_options *options, hw_id *answer, hw_error *error);
    /* Destroys physical memory.
     *  - mapped.destroy: memory that is mapped stays accessible until it is unmapped, also to outstanding work, and to
     *    devices that get access later.
     *  - mapped.returns: bytes that are destroyed and not mapped can be allocated again. */
    int32_t (*destroy_memory)(hw_backend *backend, hw_id memory, hw_error *error);
    /* Maps all of the memory at `ptr`, inside a reserved range. No device may access it before `set_memory_access`.
     *  - mapped.contiguous: one copy, fill or product can use several mappings that have no gap between them.
     *  - mapped.move: memory that is unmapped and mapped at another address keeps its bytes.
     *  - mapped.map-checked: an address that is no multiple of hw_capabilities.mapped_memory_granularity returns
     *    HW_ERROR_INVALID_ARGUMENT. Bytes that leave the range, and those in which memory is mapped, return
     *    HW_ERROR_INVALID_POINTER. Memory of another device returns HW_ERROR_WRONG_DEVICE. Nothing changes.
     *  - mapped.capture: if HW_FACT_CREATE_DURING_CAPTURE holds, the calls of mapped memory neither fail nor disturb a
     *    capture, from any thread and in any mode. */
    int32_t (*map_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, hw_id memory, hw_error *error);
    /* Lets the device `accessing` read and write memory that is mapped for `device`.
     *  - mapped.peer: work of each device that has access uses the same bytes at the same addresses.
     *  - mapped.whole: a range that does not consist of whole mappings returns HW_ERROR_INVALID_POINTER, and nothing changes;
     *    also from `unmap_memory`. */
    int32_t (*set_memory_access)(hw_backend *backend, uint32_t device, uint64_t ptr, uint64_t bytes, uint32_t accessing, hw_error *error);
    /* Unmaps one or more whole mappings, for every device. The addresses stay reserved. */
    int32_t (*unmap_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, uint64_t bytes, hw_error *error);

    /* ---- group adopt: device memory that other code allocated */
    /* Describes the device memory at an address, which any code of this process may have allocated.
     *  - foreign.range: the range is the whole block that contains the address, or the one mapping of physical memory that
     *    contains it. Every address in a range gives the same range.
     *  - foreign.kind: memory of `map_memory` is HW_RANGE_MAPPED, a stream-ordered block is HW_RANGE_STREAM_ORDERED, and a
     *    plain block is HW_RANGE_PLAIN.
     *  - foreign.transports: memory that was made shareable by a transport lists it. `export_memory` exports the start of the
     *    range by each transport that it lists, unless the memory itself came from another process.
     *  - foreign.unknown: null, and an address in no memory of a device, return HW_ERROR_INVALID_POINTER. An address in
     *    memory of another device returns HW_ERROR_WRONG_DEVICE. */
    int32_t (*describe_memory)(hw_backend *backend, uint32_t device, uint64_t ptr, hw_memory_range *answer, hw_error *error);
    /* Opens mapped memory of another process without mapping it. `destroy_memory` gives it back.
     *  - ipc.import-maps: once mapped, it is the memory of the handle: each process reads the bytes that the other writes.
     *  - ipc.import-checked: a handle that no exporter made, of another device's UUID, without the descriptor that its
     *    transport needs, or of memory that is not mapped memory, returns HW_ERROR_INVALID_ARGUMENT, and nothing is opened.
     *    The handles of HW_TRANSPORT_FABRIC do not tell memory of `allocate` from mapped memory if the size is one of mapped
     *    memory. */
    int32_t (*import_memory)(hw_backend *backend, uint32_t device, const hw_memory_handle *memory, hw_id *answer, hw_error *error);

    /* ---- group rows: two-dimensional copies in one call; without it, the program makes a flat copy of each row */
    /* Enqueues a copy of rows, from or to device memory. The other side is device memory or page-locked host memory.
     *  - copy-2d.exact: exactly `width` bytes of each row arrive, unchanged; bytes between the rows and beside them keep
     *    their value on both sides.
     *  - copy-2d.ordered: the copy runs in the order of the stream.
     *  - copy-2d.zero: a copy of 0 rows, or of rows of 0 bytes, succeeds and copies nothing.
     *  - copy-2d.pitch: a pitch less than the width returns HW_ERROR_INVALID_ARGUMENT, and nothing is enqueued. A pitch has
     *    no largest value. */
    int32_t (*copy_2d)(hw_backend *backend, const hw_memory_copy_2d *copy, hw_id stream, hw_error *error);
};

/* The only symbol of a plugin. `host` is valid for the life of the process. Null rejects the program. */
const hw_plugin *highwater_plugin(const hw_host *host);

#ifdef __cplusplus
}
#endif

#endif /* HIGHWATER_H */
