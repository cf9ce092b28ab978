/* A plugin for tests: well-formed by default, and wrong in one way where the number behind the mark names one.
 *
 * It has one device and no memory behind its addresses: good for asking, not for computing. `hw_test_calls` counts the calls of
 * its table. The test builds it once, and makes a copy for each way to be wrong by writing its number behind the mark. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include HEADER

/* The ways to be wrong. */
enum {
    NOTHING,
    /* ---- met when it is loaded */
    ENTRY_NULL, ENTRY_HANGS, ENTRY_SLOW,
    PLUGIN_SIZE_ZERO, PLUGIN_SIZE_HUGE, PLUGIN_SIZE_SMALL, PLUGIN_SURPLUS, PLUGIN_MISALIGNED,
    NAME_NULL, NAME_EMPTY, NAME_ODD, NAME_ENDLESS, DESCRIPTION_NO_UTF8, VENDOR_NULL,
    VERSIONS_CROSSED, VERSIONS_ABOVE, VERSIONS_ZERO, OPEN_NULL, TABLE_CALL_NULL,
    TABLE_NULL, TABLE_MISALIGNED, TABLE_SIZE_ZERO, TABLE_SIZE_SMALL, TABLE_SIZE_HUGE, TABLE_SIZE_ODD,
    TABLE_EMPTY, SLOT_REQUIRED_NULL, SLOT_CAPTURE_NULL, SLOT_BLAS_NULL, SLOT_HOST_NULL,
    /* ---- met when its backend is opened */
    OPEN_UNKNOWN_CODE, OPEN_NO_BACKEND, OPEN_ENDLESS_TEXT, OPEN_PANICS, OPEN_NO_UTF8,
    NO_DEVICE, TOO_MANY_DEVICES, IDENTITY_ENDLESS, IDENTITY_NAMELESS, IDENTITY_FLAG, IDENTITY_VERSIONS, IDENTITY_TOO_LARGE,
    CAPABILITIES_ALIGNMENT, CAPABILITIES_LIE, ORDINAL_OTHER,
    /* ---- met when it is called */
    ID_GENERATION_ZERO, ID_TAG_OTHER, ID_DEVICE_OTHER, ID_NAMED, EVENT_UNWRITTEN, COMPLETION_UNKNOWN, CODE_UNKNOWN, CODE_NEGATIVE,
    ADDRESS_ZERO, HOST_NULL, HOST_MISALIGNED, HANDLE_NULL, DESCRIPTOR_BAD, DESCRIPTOR_CLOSED, TRANSPORT_UNKNOWN, FLAG_UNKNOWN,
    CALL_PANICS, ERROR_SIZE_GARBAGE, CLOSE_FAILS, HANDLE_CLOSE_FAILS
};

static const volatile struct { char mark[8]; uint32_t wrong; } chosen = {{'W', 'R', 'O', 'N', 'G', '-', '-', '>'}, NOTHING};
#define IS(way) (chosen.wrong == (way))

#define EXPORT __attribute__((visibility("default")))
EXPORT uint64_t hw_test_calls = 0;

struct hw_backend { uint32_t tag; };
struct hw_handle { int unused; };
static uint32_t generation = 0;

static void say(hw_error *error, const char *message) {
    strncpy(error->message, message, sizeof error->message - 1);
}

static int32_t ok(void) {
    __atomic_fetch_add(&hw_test_calls, 1, __ATOMIC_RELAXED);
    return HW_OK;
}

static int32_t new_id(hw_backend *backend, uint32_t device, hw_id *id) {
    hw_id made = {1, 0, backend->tag, device};
    made.generation = __atomic_add_fetch(&generation, 1, __ATOMIC_RELAXED);
    if (IS(ID_GENERATION_ZERO)) made.generation = 0;
    if (IS(ID_TAG_OTHER)) made.tag += 1;
    if (IS(ID_DEVICE_OTHER)) made.device = 99;
    if (IS(ID_NAMED)) made.slot = HW_FIRST_NAMED_SLOT;
    *id = made;
    return ok();
}

static int32_t close_backend(hw_backend *backend, hw_error *error) {
    free(backend);
    if (IS(CLOSE_FAILS)) { say(error, "it does not close"); return HW_ERROR_INVALID_STATE; }
    return ok();
}

static int32_t identity(hw_backend *backend, hw_identity *answer, hw_error *error) {
    (void)backend; (void)error;
    answer->real_device = IS(IDENTITY_FLAG) ? 7 : 0;
    if (!IS(IDENTITY_NAMELESS)) strcpy(answer->name, "test");
    strcpy(answer->description, "A device for tests");
    strcpy(answer->versions, IS(IDENTITY_VERSIONS) ? "test 1" : "test\t1\nother\t2");
    strcpy(answer->blas_workspace_variables, "TEST_WORKSPACE_CONFIG");
    if (IS(IDENTITY_ENDLESS)) memset(answer->name, 'a', sizeof answer->name);
    if (IS(IDENTITY_TOO_LARGE)) answer->size = 1 << 20;
    return ok();
}

static int32_t device_count(hw_backend *backend, uint32_t *answer, hw_error *error) {
    (void)backend; (void)error;
    *answer = IS(NO_DEVICE) ? 0 : IS(TOO_MANY_DEVICES) ? UINT32_MAX : 1;
    return ok();
}

static int32_t device_info(hw_backend *backend, uint32_t device, hw_device_info *answer, hw_error *error) {
    (void)backend; (void)error;
    answer->ordinal = IS(ORDINAL_OTHER) ? 5 : device;
    answer->memory_bytes = 1 << 20;
    strcpy(answer->name, "test");
    answer->has_numa_node = IS(FLAG_UNKNOWN) ? 2 : 0;
    return ok();
}

static int32_t capabilities(hw_backend *backend, uint32_t device, hw_capabilities *answer, hw_error *error) {
    (void)backend; (void)device; (void)error;
    answer->abilities = HW_CAN_GEMM_F32 | HW_CAN_CAPTURE | HW_CAN_SHAREABLE_MEMORY | (UINT64_C(1) << 63);
    if (IS(CAPABILITIES_LIE)) answer->abilities |= HW_CAN_LT_PLANS | HW_CAN_EVENT_TIMING;
    answer->facts = HW_FACT_SET_STREAM_RESETS_WORKSPACE;
    answer->ipc_transports = 1u << HW_TRANSPORT_DESCRIPTOR | 1u << 31;
    answer->workspace_alignment = IS(CAPABILITIES_ALIGNMENT) ? 3 : 256;
    return ok();
}

static int32_t memory_info(hw_backend *backend, uint32_t device, hw_memory_info *answer, hw_error *error) {
    (void)backend; (void)device; (void)error;
    answer->free = answer->total = 1 << 20;
    return ok();
}

static int32_t live_objects(hw_backend *backend, hw_live_objects *answer, hw_error *error) {
    (void)backend; (void)answer; (void)error;
    return ok();
}

static int32_t is_exiting(hw_backend *backend, uint32_t *answer, hw_error *error) {
    (void)backend; (void)error;
    *answer = 0;
    return ok();
}

static int32_t create_stream(hw_backend *backend, uint32_t device, const hw_stream_options *options, hw_id *answer, hw_error *error) {
    (void)options; (void)error;
    return new_id(backend, device, answer);
}

static int32_t create_event(hw_backend *backend, uint32_t device, const hw_event_options *options, hw_id *answer, hw_error *error) {
    (void)options; (void)error;
    if (IS(EVENT_UNWRITTEN)) return ok();
    return new_id(backend, device, answer);
}

static int32_t on_id(hw_backend *backend, hw_id id, hw_error *error) {
    (void)backend; (void)id; (void)error;
    return ok();
}

static int32_t synchronize_stream(hw_backend *backend, hw_id stream, hw_error *error) {
    (void)backend; (void)stream;
    ok();
    if (IS(CODE_UNKNOWN)) { say(error, "words"); return 4711; }
    if (IS(CODE_NEGATIVE)) return -5;
    if (IS(CALL_PANICS)) { say(error, "a panic's words"); return HW_PANICKED; }
    if (IS(ERROR_SIZE_GARBAGE)) {
        error->size = UINT64_MAX;
        error->has_vendor_code = 9;
        memset(error->message, 'm', sizeof error->message);
        memset(error->hint, 0xff, sizeof error->hint);
        return HW_ERROR_DEVICE_LOST;
    }
    return HW_OK;
}

static int32_t query(hw_backend *backend, hw_id id, uint32_t *answer, hw_error *error) {
    (void)backend; (void)id; (void)error;
    *answer = IS(COMPLETION_UNKNOWN) ? 7 : HW_COMPLETE;
    return ok();
}

static int32_t on_device(hw_backend *backend, uint32_t device, hw_error *error) {
    (void)backend; (void)device; (void)error;
    return ok();
}

static int32_t on_two_ids(hw_backend *backend, hw_id first, hw_id second, hw_error *error) {
    (void)backend; (void)first; (void)second; (void)error;
    return ok();
}

static int32_t allocate(hw_backend *backend, uint32_t device, const hw_allocate_options *options, uint64_t *answer, hw_error *error) {
    static uint64_t next = 0x100000;
    (void)backend; (void)device; (void)error;
    *answer = IS(ADDRESS_ZERO) ? 0 : __atomic_fetch_add(&next, (options->bytes + 511) / 256 * 256, __ATOMIC_RELAXED);
    return ok();
}

static int32_t free_block(hw_backend *backend, uint32_t device, uint64_t ptr, hw_id stream, hw_error *error) {
    (void)backend; (void)device; (void)ptr; (void)stream; (void)error;
    return ok();
}

/* A copy that the tests recognize. */
enum { REFUSED_DESTINATION = 0x1040, REFUSED_BYTES = 16 };

static int32_t copy(hw_backend *backend, const hw_memory_copy *copy, hw_id stream, hw_error *error) {
    (void)backend; (void)stream;
    if (copy->dst.address == REFUSED_DESTINATION && copy->bytes == REFUSED_BYTES) { say(error, "refused"); return HW_ERROR_INVALID_POINTER; }
    return ok();
}

static int32_t fill(hw_backend *backend, const hw_memory_fill *fill, hw_id stream, hw_error *error) {
    (void)backend; (void)fill; (void)stream; (void)error;
    return ok();
}

static int32_t host_allocate(hw_backend *backend, uint64_t bytes, const hw_host_options *options, void **answer, hw_error *error) {
    (void)backend; (void)options; (void)error;
    void *block = NULL;
    if (posix_memalign(&block, 4096, bytes + 64) != 0) return HW_ERROR_OUT_OF_MEMORY;
    *answer = IS(HOST_NULL) ? NULL : IS(HOST_MISALIGNED) ? (char *)block + 8 : block;
    return ok();
}

static int32_t host_free(hw_backend *backend, void *ptr, hw_error *error) {
    (void)backend; (void)error;
    free(ptr);
    return ok();
}

static int32_t host_device_address(hw_backend *backend, void *ptr, uint32_t device, uint64_t *answer, hw_error *error) {
    (void)backend; (void)device; (void)error;
    *answer = (uint64_t)(uintptr_t)ptr;
    return ok();
}

static int32_t create_handle(hw_backend *backend, uint32_t device, uint32_t kind, hw_handle **answer, hw_error *error) {
    (void)backend; (void)device; (void)kind; (void)error;
    *answer = IS(HANDLE_NULL) ? NULL : calloc(1, sizeof **answer);
    return ok();
}

static int32_t handle_on_id(hw_handle *handle, hw_id stream, hw_error *error) {
    (void)handle; (void)stream; (void)error;
    return ok();
}

static int32_t handle_workspace(hw_handle *handle, const hw_workspace *workspace, hw_error *error) {
    (void)handle; (void)workspace; (void)error;
    return ok();
}

static int32_t handle_mode(hw_handle *handle, uint32_t mode, hw_error *error) {
    (void)handle; (void)mode; (void)error;
    return ok();
}

static int32_t handle_gemm(hw_handle *handle, const hw_gemm *gemm, hw_error *error) {
    (void)handle; (void)gemm; (void)error;
    return ok();
}

static int32_t handle_raw(hw_handle *handle, uint64_t *answer, hw_error *error) {
    (void)error;
    *answer = (uint64_t)(uintptr_t)handle;
    return ok();
}

static int32_t handle_destroy(hw_handle *handle, hw_error *error) {
    (void)handle; (void)error;
    return ok();
}

static int32_t handle_close(hw_handle *handle, hw_error *error) {
    free(handle);
    if (IS(HANDLE_CLOSE_FAILS)) { say(error, "it does not close"); return HW_ERROR_VENDOR; }
    return ok();
}

static int32_t begin_capture(hw_backend *backend, hw_id stream, uint32_t mode, hw_error *error) {
    (void)backend; (void)stream; (void)mode; (void)error;
    return ok();
}

static int32_t id_from_id(hw_backend *backend, hw_id id, hw_id *answer, hw_error *error) {
    (void)error;
    return new_id(backend, id.device, answer);
}

static int32_t is_capturing(hw_backend *backend, hw_id stream, uint32_t *answer, hw_error *error) {
    (void)backend; (void)stream; (void)error;
    *answer = IS(FLAG_UNKNOWN) ? 2 : 0;
    return ok();
}

static int32_t export_memory(hw_backend *backend, uint32_t device, uint64_t ptr, uint32_t transport, hw_memory_handle *answer, hw_error *error) {
    (void)backend; (void)device; (void)ptr; (void)error;
    answer->transport = IS(TRANSPORT_UNKNOWN) ? 31 : transport;
    answer->descriptor = IS(DESCRIPTOR_BAD) ? -7 : IS(DESCRIPTOR_CLOSED) ? 9999 : dup(0);
    answer->descriptor_token = 1;
    return ok();
}

static int32_t open_memory(hw_backend *backend, uint32_t device, const hw_memory_handle *memory, uint64_t *answer, hw_error *error) {
    (void)backend; (void)device; (void)memory; (void)error;
    *answer = 4096;
    return ok();
}

static int32_t close_memory(hw_backend *backend, uint32_t device, uint64_t ptr, hw_error *error) {
    (void)backend; (void)device; (void)ptr; (void)error;
    return ok();
}

static int32_t export_event(hw_backend *backend, hw_id event, hw_event_handle *answer, hw_error *error) {
    (void)backend; (void)event; (void)error;
    answer->descriptor = -1;
    return ok();
}

static int32_t open_event(hw_backend *backend, uint32_t device, const hw_event_handle *event, hw_id *answer, hw_error *error) {
    (void)event; (void)error;
    return new_id(backend, device, answer);
}

static int32_t release_descriptor(hw_backend *backend, uint64_t token, hw_error *error) {
    (void)backend; (void)token; (void)error;
    return ok();
}

static hw_table tables[2];

static const hw_table *table(uint32_t version) {
    hw_table *t = tables;
    hw_table made = {
        .size = sizeof made, .close = close_backend, .identity = identity, .device_count = device_count,
        .device_info = device_info, .capabilities = capabilities, .memory_info = memory_info, .live_objects = live_objects,
        .is_exiting = is_exiting, .create_stream = create_stream, .destroy_stream = on_id, .query_stream = query,
        .synchronize_stream = synchronize_stream, .synchronize_device = on_device, .stream_wait_event = on_two_ids,
        .create_event = create_event, .destroy_event = on_id, .record_event = on_two_ids, .query_event = query,
        .synchronize_event = on_id, .allocate = allocate, .free = free_block, .copy = copy, .fill = fill,
        .host_allocate = host_allocate, .host_free = host_free, .host_device_address = host_device_address,
        .create_handle = create_handle, .handle_set_stream = handle_on_id, .handle_set_workspace = handle_workspace,
        .handle_set_math_mode = handle_mode, .handle_set_atomics_mode = handle_mode, .handle_gemm = handle_gemm,
        .handle_raw = handle_raw, .handle_destroy = handle_destroy, .handle_close = handle_close,
        .begin_capture = begin_capture, .end_capture = id_from_id, .is_capturing = is_capturing,
        .instantiate_graph = id_from_id, .launch_graph = on_two_ids, .destroy_graph = on_id, .destroy_graph_exec = on_id,
        .export_memory = export_memory, .open_memory = open_memory, .close_memory = close_memory,
        .export_event = export_event, .open_event = open_event, .release_descriptor = release_descriptor,
    };
    (void)version;
    *t = made;
    if (IS(TABLE_NULL)) return NULL;
    if (IS(TABLE_MISALIGNED)) return (const hw_table *)((const char *)t + 4);
    if (IS(TABLE_SIZE_ZERO)) t->size = 0;
    if (IS(TABLE_SIZE_SMALL)) t->size = offsetof(hw_table, copy);
    if (IS(TABLE_SIZE_HUGE)) t->size = UINT64_MAX;
    if (IS(TABLE_SIZE_ODD)) t->size -= 3;
    if (IS(TABLE_EMPTY)) { memset(t, 0, sizeof *t); t->size = sizeof *t; }
    if (IS(SLOT_REQUIRED_NULL)) t->query_event = NULL;
    if (IS(SLOT_CAPTURE_NULL)) t->end_capture = NULL;
    if (IS(SLOT_BLAS_NULL)) t->handle_close = NULL;
    if (IS(SLOT_HOST_NULL)) t->host_free = NULL;
    return t;
}

static int32_t open_backend(const hw_open *request, hw_backend **backend, hw_error *error) {
    if (IS(OPEN_UNKNOWN_CODE)) { say(error, "words"); return 4711; }
    if (IS(OPEN_NO_BACKEND)) return HW_OK;
    if (IS(OPEN_PANICS)) { say(error, "a panic's words"); return HW_PANICKED; }
    if (IS(OPEN_ENDLESS_TEXT)) { memset(error->message, 'm', sizeof error->message); return HW_ERROR_LIBRARY_MISSING; }
    if (IS(OPEN_NO_UTF8)) { say(error, "\xff\xfe words"); return HW_ERROR_DEVICE_MISSING; }
    *backend = calloc(1, sizeof **backend);
    (*backend)->tag = request->tag;
    return HW_OK;
}

#ifdef WRONG_UNRESOLVED
void hw_test_no_such_function(void);
EXPORT void hw_test_caller(void) { hw_test_no_such_function(); }
#endif

#ifndef WRONG_NO_ENTRY
static struct { hw_plugin plugin; uint64_t surplus; } told;
static char endless[8192];

EXPORT const hw_plugin *highwater_plugin(const hw_host *host) {
    hw_plugin made = {
        sizeof made, HW_TABLE_VERSION_MIN, 1, "test", "A device for tests", "Highwater", "1.0", open_backend, table,
    };
    if (host->log) host->log(HW_LOG_WARN, "the entry point was called", 26);
    if (IS(ENTRY_NULL)) return NULL;
    if (IS(ENTRY_HANGS)) for (;;) sleep(1);
    if (IS(ENTRY_SLOW)) usleep(50000);
    if (IS(PLUGIN_SIZE_ZERO)) made.size = 0;
    if (IS(PLUGIN_SIZE_HUGE)) made.size = UINT64_MAX;
    if (IS(PLUGIN_SIZE_SMALL)) made.size = offsetof(hw_plugin, open);
    if (IS(PLUGIN_SURPLUS)) made.size += 8;
    if (IS(NAME_NULL)) made.name = NULL;
    if (IS(NAME_EMPTY)) made.name = "";
    if (IS(NAME_ODD)) made.name = "../test";
    if (IS(NAME_ENDLESS)) { memset(endless, 'a', sizeof endless); made.name = endless; }
    if (IS(DESCRIPTION_NO_UTF8)) made.description = "\xff";
    if (IS(VENDOR_NULL)) made.vendor = NULL;
    if (IS(VERSIONS_CROSSED)) { made.version_min = 2; made.version_max = 1; }
    if (IS(VERSIONS_ABOVE)) { made.version_min = 2; made.version_max = 9; }
    if (IS(VERSIONS_ZERO)) { made.version_min = 0; made.version_max = 0; }
    if (IS(OPEN_NULL)) made.open = NULL;
    if (IS(TABLE_CALL_NULL)) made.table = NULL;
    told.plugin = made;
    told.surplus = 1;
    return IS(PLUGIN_MISALIGNED) ? (const hw_plugin *)((const char *)&told + 4) : &told.plugin;
}
#endif
