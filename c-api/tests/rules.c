/* The rules of the header: what is refused, and what a refusal says. Ends with 0 if all of them hold. */
#define _GNU_SOURCE
#include <highwater/highwater.h>

#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXPECT(condition)                                                                                   \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "%s:%d: not %s; %s\n", __FILE__, __LINE__, #condition, highwater_last_error()); \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)
#define OK(call) EXPECT((call) == HIGHWATER_OK)
/* The call is refused, and the message has the name of the function, the words and a remedy. */
#define REFUSED(call, kind, words)                                              \
    do {                                                                        \
        EXPECT((call) == HIGHWATER_ERROR_##kind);                               \
        EXPECT(strncmp(highwater_last_error(), #call, strcspn(#call, "(")) == 0); \
        EXPECT(strstr(highwater_last_error(), (words)) != NULL);                \
        EXPECT(strlen(highwater_last_hint()) > 10);                             \
        EXPECT(strstr(highwater_last_error(), highwater_last_hint()) != NULL);  \
        EXPECT(!shows_rust());                                                  \
    } while (0)

/* Whether the last error shows a value as Rust's debug form prints it, has a name or a word of Rust alone, or counts one thing in the plural. */
static int shows_rust(void) {
    static const char *const forms[] = {" { ", "{ ..", "Ptr(", "Id(", "Some(", "None", "DeviceSlice", "PinnedSlice", "GemmShape",
                                       "::", "_stream`", "`share`", "`raw_", "drop ", "clones"};
    static const char *const plurals[] = {"bytes", "values", "buffers", "rows", "devices"};
    const char *error = highwater_last_error();
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (strstr(error, forms[i])) {
            return 1;
        }
    }
    for (size_t i = 0; i < sizeof plurals / sizeof *plurals; i++) {
        char one[32];
        snprintf(one, sizeof one, " 1 %s", plurals[i]);
        if (strstr(error, one)) {
            return 1;
        }
    }
    return 0;
}

static highwater_runtime *runtime;
static highwater_device *device;
static highwater_stream *stream;

static void statuses(void) {
    EXPECT(strcmp(highwater_status_text(HIGHWATER_OK), "success") == 0);
    EXPECT(strcmp(highwater_status_text(HIGHWATER_ERROR_OUT_OF_MEMORY), "out of memory") == 0);
    EXPECT(strcmp(highwater_status_text(HIGHWATER_PANICKED), "panic") == 0);
    EXPECT(strcmp(highwater_status_text(12345), "unknown status") == 0);
    EXPECT(strchr(highwater_version(), '.') != NULL);
    int64_t code = 7;
    EXPECT(!highwater_last_vendor_code(&code) && code == 7);
}

static void opening(void) {
    highwater_runtime *none = NULL;
    char *report = NULL;
    REFUSED(highwater_open("metal", NULL, &none, &report), UNKNOWN_BACKEND, "`metal`");
    EXPECT(none == NULL && strstr(report, "\"backends\":[{") != NULL);
    highwater_text_release(&report);
    highwater_text_release(&report);
    EXPECT(report == NULL);
    REFUSED(highwater_open("mock", NULL, NULL, NULL), INVALID_ARGUMENT, "highwater_open: ");
    REFUSED(highwater_open("auto", NULL, NULL, NULL), INVALID_ARGUMENT, "the place for the highwater_runtime is null");
    REFUSED(highwater_open(NULL, NULL, NULL, NULL), INVALID_ARGUMENT, "the place for the highwater_runtime is null");
    REFUSED(highwater_open("auto", NULL, &none, NULL), UNKNOWN_BACKEND, "no backend is named `auto`");
    EXPECT(strstr(highwater_last_hint(), "pass NULL instead of a name") != NULL);
    REFUSED(highwater_open("", NULL, &none, NULL), UNKNOWN_BACKEND, "no backend is named ``");
    EXPECT(strstr(highwater_last_hint(), "pass NULL instead of a name") != NULL);
    const char *given = getenv("HIGHWATER_BACKEND");
    char *before = given ? strdup(given) : NULL;
    setenv("HIGHWATER_BACKEND", "auto", 1);
    REFUSED(highwater_open(NULL, NULL, &none, NULL), UNKNOWN_BACKEND, "asked for by HIGHWATER_BACKEND");
    EXPECT(strstr(highwater_last_hint(), "unset HIGHWATER_BACKEND") != NULL);
    unsetenv("HIGHWATER_BACKEND");
    if (before) {
        setenv("HIGHWATER_BACKEND", before, 1);
    }
    free(before);
    setenv("HIGHWATER_MOCK", "devices=0", 1);
    REFUSED(highwater_open("mock", NULL, &none, NULL), INVALID_ARGUMENT, "0 devices");
    unsetenv("HIGHWATER_MOCK");
    highwater_open_options folder = {.size = sizeof folder, .plugin_path = "/"};
    REFUSED(highwater_open(NULL, &folder, &none, NULL), UNSUPPORTED, "not a regular file");
    folder = (highwater_open_options){.size = sizeof folder, .plugin_folder = "relative"};
    REFUSED(highwater_open("mock", &folder, &none, NULL), INVALID_ARGUMENT, "highwater_open_options.plugin_folder is `relative`, expected an absolute path");
    folder.plugin_folder = "";
    REFUSED(highwater_open("mock", &folder, &none, NULL), INVALID_ARGUMENT, "highwater_open_options.plugin_folder is ``, expected an absolute path");
    folder.plugin_folder = "/nowhere";
    OK(highwater_open("mock", &folder, &none, NULL));
    OK(highwater_close(&none, NULL));
    REFUSED(highwater_open("m\xff", NULL, &none, NULL), INVALID_ARGUMENT, "UTF-8");

    highwater_open_options options = {0};
    REFUSED(highwater_open("mock", &options, &none, NULL), INVALID_ARGUMENT, "highwater_open_options.size is 0");
    /* A newer program passes a longer struct. */
    struct {
        highwater_open_options known;
        uint64_t unknown;
    } longer = {{.size = sizeof longer}, 1};
    REFUSED(highwater_open("mock", &longer.known, &none, NULL), UNSUPPORTED, "does not know");
    longer.unknown = 0;
    OK(highwater_open("mock", &longer.known, &none, NULL));
    OK(highwater_close(&none, NULL));
    /* No version of the struct is shorter: the fields behind such a size would be ignored. */
    options.pinned_cap_bytes = 1;
    char expected[64];
    snprintf(expected, sizeof expected, "highwater_open_options.size is %zu, expected %zu;", sizeof(void *), sizeof options);
    options.size = sizeof(&options);
    REFUSED(highwater_open("mock", &options, &none, NULL), INVALID_ARGUMENT, expected);
    EXPECT(strstr(highwater_last_hint(), "sizeof(highwater_open_options)") != NULL);
    options.size = offsetof(highwater_open_options, pinned_cap_bytes);
    REFUSED(highwater_open("mock", &options, &none, NULL), INVALID_ARGUMENT, "highwater_open_options.size is 32, expected 80");
    EXPECT(none == NULL);
    highwater_pinned *pinned = NULL;
    options.size = sizeof options;
    OK(highwater_open("mock", &options, &none, NULL));
    REFUSED(highwater_pinned_allocate(none, 4096, &pinned), INVALID_ARGUMENT, "4096");
    OK(highwater_close(&none, NULL));
    OK(highwater_survey(&report));
    EXPECT(strstr(report, "\"mock\"") != NULL);
    highwater_text_release(&report);
}

static void handles(void) {
    highwater_buffer *buffer = NULL;
    uint64_t number = 0;
    REFUSED(highwater_stream_synchronize(NULL), INVALID_ARGUMENT, "highwater_stream_synchronize: invalid argument: the highwater_stream is null");
    REFUSED(highwater_stream_synchronize((highwater_stream *)device), INVALID_HANDLE, "expected a live highwater_stream");
    REFUSED(highwater_stream_synchronize((highwater_stream *)((char *)stream + 1)), INVALID_HANDLE, "no such handle");
    REFUSED(highwater_buffer_address(buffer, &number), INVALID_ARGUMENT, "the highwater_buffer is null");
    REFUSED(highwater_device_allocate(device, 4, NULL), INVALID_ARGUMENT, "the place for the highwater_buffer");
    REFUSED(highwater_stream_raw(stream, NULL), INVALID_ARGUMENT, "the place for the raw stream");
    REFUSED(highwater_buffer_release(NULL), INVALID_ARGUMENT, "the place for the highwater_buffer");
    OK(highwater_buffer_release(&buffer));
    OK(highwater_device_allocate(device, 4, &buffer));
    highwater_stream *wrong = (highwater_stream *)buffer;
    REFUSED(highwater_stream_release(&wrong), INVALID_HANDLE, "expected a live highwater_stream");
    OK(highwater_buffer_release(&buffer));
    EXPECT(buffer == NULL);
    OK(highwater_buffer_release(&buffer));
    REFUSED(highwater_device_get(runtime, 99, (highwater_device **)&wrong), INVALID_ARGUMENT, "99");
}

static void memory(void) {
    highwater_buffer *buffer = NULL, *other = NULL;
    highwater_pinned *pinned = NULL;
    unsigned char bytes[8] = {1, 2, 3, 4, 5, 6, 7, 8}, found[8] = {0};
    void *data = NULL;
    size_t count = 0;
    uint64_t address = 0;
    bool complete = false;
    REFUSED(highwater_device_allocate(device, SIZE_MAX, &buffer), INVALID_ARGUMENT, "address space");
    OK(highwater_device_allocate(device, 8, &buffer));
    OK(highwater_stream_allocate(stream, 8, &other));
    OK(highwater_buffer_bytes(buffer, &count));
    OK(highwater_buffer_address(buffer, &address));
    EXPECT(count == 8 && address != 0);
    REFUSED(highwater_write(stream, bytes, buffer, 4, 8), INVALID_ARGUMENT, "highwater_write: invalid argument: the range of 8 bytes at offset 4 leaves the memory, which has 8 bytes");
    REFUSED(highwater_write(stream, bytes, buffer, SIZE_MAX, 8), INVALID_ARGUMENT, "leaves the memory");
    REFUSED(highwater_write(stream, bytes, buffer, 8, 1), INVALID_ARGUMENT, "the range of 1 byte at offset 8 leaves the memory");
    REFUSED(highwater_copy(stream, other, 0, buffer, 0, 9), INVALID_ARGUMENT, "leaves the memory, which has 8 bytes");
    REFUSED(highwater_write(stream, NULL, buffer, 0, 1), INVALID_ARGUMENT, "the source is null, expected the address of 1 byte;");
    REFUSED(highwater_write(stream, NULL, buffer, 0, 8), INVALID_ARGUMENT, "the source is null");
    REFUSED(highwater_read(stream, buffer, 0, NULL, 8), INVALID_ARGUMENT, "the destination is null");
    OK(highwater_write(stream, NULL, buffer, 0, 0));
    OK(highwater_write(stream, bytes, buffer, 0, 8));
    OK(highwater_copy(stream, buffer, 2, other, 0, 6));
    OK(highwater_fill(stream, other, 6, 2, 9));
    OK(highwater_read(stream, other, 0, found, 8));
    EXPECT(found[0] == 3 && found[5] == 8 && found[7] == 9);
    REFUSED(highwater_copy(stream, buffer, 0, buffer, 2, 4), INVALID_ARGUMENT, "overlap");

    OK(highwater_pinned_allocate(runtime, 8, &pinned));
    OK(highwater_pinned_bytes(pinned, &count));
    OK(highwater_pinned_data(pinned, &data));
    OK(highwater_copy_to_host(stream, buffer, 0, pinned, 1, 7));
    OK(highwater_pinned_wait(pinned, false));
    EXPECT(count == 8 && ((unsigned char *)data)[7] == 7);
    REFUSED(highwater_copy_to_host(stream, buffer, 0, pinned, 2, 7), INVALID_ARGUMENT, "the range of 7 bytes at offset 2 leaves the memory");
    OK(highwater_copy_to_device(stream, pinned, 1, buffer, 0, 4));
    OK(highwater_pinned_used_on(pinned, stream, false));
    OK(highwater_buffer_used_on(buffer, stream));
    /* The word of a released handle of pinned memory stays until the block of memory has a new use. */
    highwater_pinned *copy = pinned, *again = NULL;
    OK(highwater_pinned_release(&pinned));
    EXPECT(pinned == NULL);
    REFUSED(highwater_pinned_data(copy, &data), INVALID_HANDLE, "a released handle, expected a live highwater_pinned");
    REFUSED(highwater_pinned_release(&copy), INVALID_HANDLE, "highwater_pinned_release: ");
    EXPECT(copy != NULL);
    OK(highwater_pinned_allocate(runtime, 8, &again));
    OK(highwater_pinned_allocate(runtime, 8, &pinned));
    EXPECT(again != pinned);
    OK(highwater_pinned_release(&again));
    OK(highwater_pinned_wait(pinned, true));
    OK(highwater_pinned_release(&pinned));
    OK(highwater_buffer_release(&buffer));
    OK(highwater_buffer_release(&other));
    OK(highwater_stream_synchronize(stream));
    OK(highwater_stream_is_complete(stream, &complete));
    EXPECT(complete);
}

/* Rows of a matrix, in each direction. */
static void rows(void) {
    highwater_buffer *matrix = NULL, *columns = NULL;
    highwater_pinned *pinned = NULL;
    unsigned char found[12] = {0};
    void *data = NULL;
    OK(highwater_device_allocate(device, 12, &matrix));
    OK(highwater_device_allocate(device, 6, &columns));
    OK(highwater_pinned_allocate(runtime, 13, &pinned));
    OK(highwater_pinned_data(pinned, &data));
    for (int i = 0; i < 13; i++) {
        ((unsigned char *)data)[i] = (unsigned char)i;
    }
    /* 3 rows of 4 bytes, of which 2 bytes from the column 1 on; the first byte is not part of the matrix. */
    highwater_copy_shape shape = {.size = sizeof shape, .width = 2, .height = 3, .source_pitch = 4};
    OK(highwater_copy_2d_to_device(stream, pinned, 2, columns, 0, &shape));
    OK(highwater_read(stream, columns, 0, found, 6));
    EXPECT(memcmp(found, "\2\3\6\7\12\13", 6) == 0);
    OK(highwater_fill(stream, matrix, 0, 12, 99));
    shape = (highwater_copy_shape){.size = sizeof shape, .width = 2, .height = 3, .destination_pitch = 4};
    OK(highwater_copy_2d(stream, columns, 0, matrix, 2, &shape));
    OK(highwater_read(stream, matrix, 0, found, 12));
    EXPECT(memcmp(found, "cc\2\3cc\6\7cc\12\13", 12) == 0);
    shape = (highwater_copy_shape){.size = sizeof shape, .width = 1, .height = 2, .source_pitch = 4, .destination_pitch = 8};
    OK(highwater_copy_2d_to_host(stream, matrix, 7, pinned, 1, &shape));
    OK(highwater_pinned_wait(pinned, false));
    EXPECT(memcmp(data, "\0\7\2\3\4\5\6\7\10\13\12\13\14", 13) == 0);

    /* Columns of one buffer. They must not meet. */
    shape = (highwater_copy_shape){.size = sizeof shape, .width = 2, .height = 3, .source_pitch = 4, .destination_pitch = 4};
    OK(highwater_copy_2d(stream, matrix, 2, matrix, 0, &shape));
    OK(highwater_read(stream, matrix, 0, found, 12));
    EXPECT(memcmp(found, "\2\3\2\3\6\7\6\7\12\13\12\13", 12) == 0);
    REFUSED(highwater_copy_2d(stream, matrix, 1, matrix, 0, &shape), INVALID_ARGUMENT, "overlap");
    REFUSED(highwater_copy_2d(stream, matrix, 3, columns, 0, &shape), INVALID_ARGUMENT, "leaves the source, which has 9 bytes");
    REFUSED(highwater_copy_2d(stream, matrix, 13, columns, 0, &shape), INVALID_ARGUMENT, "13");
    REFUSED(highwater_copy_2d_to_device(stream, pinned, 4, columns, 0, &shape), INVALID_ARGUMENT, "leaves the source, which has 9 bytes");
    REFUSED(highwater_copy_2d_to_device(stream, pinned, SIZE_MAX, matrix, 0, &shape), INVALID_ARGUMENT, "");
    REFUSED(highwater_copy_2d_to_host(stream, matrix, 0, pinned, 4, &shape), INVALID_ARGUMENT, "leaves the destination, which has 9 bytes");
    REFUSED(highwater_copy_2d_to_host(stream, matrix, 0, pinned, 14, &shape), INVALID_ARGUMENT, "14");
    shape.source_pitch = 1;
    REFUSED(highwater_copy_2d(stream, matrix, 0, columns, 0, &shape), INVALID_ARGUMENT, "the pitch of the source is 1 byte,");
    shape.height = SIZE_MAX;
    shape.source_pitch = shape.destination_pitch = SIZE_MAX;
    REFUSED(highwater_copy_2d(stream, matrix, 0, columns, 0, &shape), INVALID_ARGUMENT, "leaves the source");
    shape.size = 12;
    REFUSED(highwater_copy_2d(stream, matrix, 0, columns, 0, &shape), INVALID_ARGUMENT, "highwater_copy_shape.size is 12");
    shape.size = sizeof(&shape);
    REFUSED(highwater_copy_2d(stream, matrix, 0, columns, 0, &shape), INVALID_ARGUMENT, "highwater_copy_shape.size is 8, expected 40;");
    EXPECT(strstr(highwater_last_hint(), "sizeof(highwater_copy_shape)") != NULL);
    shape.size = 0;
    REFUSED(highwater_copy_2d(stream, matrix, 0, columns, 0, &shape), INVALID_ARGUMENT, "highwater_copy_shape.size is 0");
    REFUSED(highwater_copy_2d_to_host(stream, matrix, 0, pinned, 0, NULL), INVALID_ARGUMENT, "highwater_copy_2d_to_host: invalid argument: the highwater_copy_shape is null");
    shape = (highwater_copy_shape){.size = sizeof shape, .width = 2};
    REFUSED(highwater_copy_2d_to_device(stream, NULL, 0, columns, 0, &shape), INVALID_ARGUMENT, "the highwater_pinned is null");
    OK(highwater_copy_2d(stream, matrix, 12, columns, 6, &shape)); /* No rows. */
    OK(highwater_pinned_release(&pinned));
    OK(highwater_buffer_release(&matrix));
    OK(highwater_buffer_release(&columns));
}

static void ends(void *user) {
    ++*(int *)user;
}

static void adopted(void) {
    highwater_buffer *owner = NULL, *buffer = NULL;
    uint64_t address = 0;
    int ended = 0;
    OK(highwater_device_allocate(device, 64, &owner));
    OK(highwater_buffer_address(owner, &address));
    OK(highwater_device_adopt(device, address, 64, ends, &ended, &buffer));
    OK(highwater_fill(stream, buffer, 0, 64, 5));
    EXPECT(ended == 0);
    OK(highwater_buffer_release(&buffer));
    OK(highwater_device_synchronize(device));
    OK(highwater_trim(runtime));
    EXPECT(ended == 1);
    unsigned char found = 0;
    OK(highwater_read(stream, owner, 63, &found, 1));
    EXPECT(found == 5);
    REFUSED(highwater_device_adopt(device, 0, 64, ends, &ended, &buffer), INVALID_POINTER, "null");
    EXPECT(ended == 2);
    OK(highwater_buffer_release(&owner));
}

static void streams(void) {
    highwater_stream *wrapped = NULL;
    highwater_event *earlier = NULL, *later = NULL, *event = NULL;
    uint64_t raw = 0, nanoseconds = 0;
    bool complete = false;
    OK(highwater_stream_raw(stream, &raw));
    OK(highwater_stream_wrap(device, raw, &wrapped));
    OK(highwater_stream_record_timed(stream, &earlier));
    OK(highwater_stream_record_timed(stream, &later));
    OK(highwater_stream_wait(wrapped, later));
    OK(highwater_event_synchronize(later));
    OK(highwater_event_is_complete(earlier, &complete));
    EXPECT(complete);
    OK(highwater_event_elapsed_ns(earlier, later, &nanoseconds));
    OK(highwater_stream_record(stream, &event));
    REFUSED(highwater_event_elapsed_ns(earlier, event, &nanoseconds), INVALID_ARGUMENT, "highwater_stream_record_timed");
    REFUSED(highwater_stream_wait_raw(stream, 0), INVALID_ARGUMENT, "0");
    highwater_stream *none = NULL;
    REFUSED(highwater_stream_wrap(device, 0, &none), INVALID_ARGUMENT, "call highwater_stream_legacy_default or highwater_stream_per_thread_default");
    const char *backend = getenv("HIGHWATER_BACKEND");
    if (backend && strcmp(backend, "mock") == 0) { /* Only the mock knows all its streams and events. */
        highwater_event *none_either = NULL;
        REFUSED(highwater_stream_wrap(device, 12345, &none), INVALID_HANDLE, "pass the result of highwater_stream_raw, and keep the stream until its handle is released");
        REFUSED(highwater_event_wrap(device, 12345, &none_either), INVALID_HANDLE, "pass the vendor's event, and keep it until its handle is released");
    }
    OK(highwater_event_release(&event));
    OK(highwater_event_release(&later));
    OK(highwater_event_release(&earlier));
    OK(highwater_stream_release(&wrapped));
    OK(highwater_stream_legacy_default(device, &wrapped));
    OK(highwater_stream_release(&wrapped));
    OK(highwater_stream_per_thread_default(device, &wrapped));
    OK(highwater_stream_release(&wrapped));
}

static uint64_t lent_handle;

static void enqueues(void *user, uint64_t handle, uint64_t workspace, size_t workspace_bytes) {
    EXPECT(handle != 0 && workspace == 0 && workspace_bytes == 0);
    EXPECT(lent_handle == 0 || handle == lent_handle); /* The pool gives the same one again. */
    lent_handle = handle;
    ++*(int *)user;
}

static void lent(void *user, uint64_t handle, uint64_t workspace, size_t workspace_bytes) {
    EXPECT(handle != 0 && workspace != 0 && workspace_bytes > 0);
    ++*(int *)user;
}

static void products(void) {
    highwater_buffer *a = NULL, *b = NULL, *c = NULL;
    const double two = 2, three = 3;
    /* 1 and 256 in 16 bits: f16, and bf16. */
    const uint16_t half_one = 0x3c00, brain_one = 0x3f80;
    double product = 0;
    float single = 0;
    uint16_t small = 0;
    int lends = 0;
    OK(highwater_device_allocate(device, 16, &a));
    OK(highwater_device_allocate(device, 8, &b));
    OK(highwater_device_allocate(device, 8, &c));
    OK(highwater_write(stream, &two, a, 8, 8));
    OK(highwater_write(stream, &three, b, 0, 8));
    highwater_gemm gemm = {.size = sizeof gemm,
                           .data_type = HIGHWATER_DATA_TYPE_F64,
                           .output_type = HIGHWATER_DATA_TYPE_F64,
                           .m = 1,
                           .n = 1,
                           .k = 1,
                           .alpha = 0.5,
                           .a = a,
                           .b = b,
                           .c = c,
                           .offset_a = 8};
    OK(highwater_gemm_run(stream, &gemm));
    OK(highwater_read(stream, c, 0, &product, 8));
    EXPECT(product == 3);
    gemm.offset_a = 4;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.offset_a is 4, expected a multiple of 8");
    gemm.offset_a = 16;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "");
    gemm.offset_a = 24;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.offset_a is 24, expected at most 16, the bytes of highwater_gemm.a");
    gemm.offset_a = 8;
    gemm.offset_b = 3;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.offset_b is 3, expected a multiple of 8");
    gemm.offset_b = 0;
    gemm.offset_c = 100;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.offset_c is 100, expected at most 8, the bytes of highwater_gemm.c");
    gemm.offset_c = 0;
    gemm.size = sizeof(&gemm);
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.size is 8, expected 168;");
    EXPECT(strstr(highwater_last_hint(), "sizeof(highwater_gemm)") != NULL);
    gemm.size = sizeof gemm;
    gemm.m = 2;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "");
    gemm.m = 1;
    gemm.c = NULL;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.c is null, expected a live highwater_buffer");
    gemm.c = c;
    gemm.b = NULL;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.b is null, expected a live highwater_buffer");
    gemm.b = (highwater_buffer *)stream;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_HANDLE, "highwater_gemm.b is a pointer that is no such handle, expected a live highwater_buffer");
    gemm.b = b;
    gemm.a = (highwater_buffer *)device;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_HANDLE, "highwater_gemm.a is a pointer");
    gemm.a = NULL;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "highwater_gemm.a is null, expected a live highwater_buffer");
    gemm.a = a;
    REFUSED(highwater_gemm_run(NULL, &gemm), INVALID_ARGUMENT, "the highwater_stream is null");
    gemm.c = a;
    gemm.offset_c = 8;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "overlap");
    gemm.c = c;
    gemm.offset_c = 0;
    gemm.data_type = 9;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "data_type is 9");
    gemm.data_type = HIGHWATER_DATA_TYPE_F16;
    REFUSED(highwater_gemm_run(stream, &gemm), INVALID_ARGUMENT, "give no result");
    REFUSED(highwater_gemm_run(stream, NULL), INVALID_ARGUMENT, "highwater_gemm is null");

    gemm.alpha = 1;
    gemm.offset_a = 0;
    for (uint32_t type = HIGHWATER_DATA_TYPE_F16; type <= HIGHWATER_DATA_TYPE_BF16; type++) {
        uint16_t one = type == HIGHWATER_DATA_TYPE_F16 ? half_one : brain_one;
        OK(highwater_write(stream, &one, a, 0, 2));
        OK(highwater_write(stream, &one, b, 0, 2));
        gemm.data_type = gemm.output_type = type;
        OK(highwater_gemm_run(stream, &gemm));
        OK(highwater_read(stream, c, 0, &small, 2));
        EXPECT(small == one);
        gemm.output_type = HIGHWATER_DATA_TYPE_F32;
        OK(highwater_gemm_run(stream, &gemm));
        OK(highwater_read(stream, c, 0, &single, 4));
        EXPECT(single == 1);
    }
    OK(highwater_blas_lend(stream, lent, &lends));
    EXPECT(lends == 1);
    OK(highwater_blas_lt_lend(stream, lent, &lends));
    EXPECT(lends == 2);
    OK(highwater_blas_enqueue(stream, enqueues, &lends));
    OK(highwater_blas_enqueue(stream, enqueues, &lends));
    EXPECT(lends == 4);
    REFUSED(highwater_blas_lend(stream, NULL, NULL), INVALID_ARGUMENT, "the callback is null");
    REFUSED(highwater_blas_lt_lend(stream, NULL, NULL), INVALID_ARGUMENT, "the callback is null");
    REFUSED(highwater_blas_enqueue(stream, NULL, NULL), INVALID_ARGUMENT, "the callback is null");
    OK(highwater_device_warm(device, 1));
    OK(highwater_buffer_release(&a));
    OK(highwater_buffer_release(&b));
    OK(highwater_buffer_release(&c));
}

static highwater_status fails(void *user) {
    return user ? highwater_stream_synchronize(NULL) : 77;
}

static void graphs(void) {
    highwater_graph *graph = NULL;
    REFUSED(highwater_capture(stream, 9, fails, NULL, &graph), INVALID_ARGUMENT, "the mode is 9");
    REFUSED(highwater_capture(stream, HIGHWATER_CAPTURE_GLOBAL, NULL, NULL, &graph), INVALID_ARGUMENT, "callback");
    REFUSED(highwater_capture(stream, HIGHWATER_CAPTURE_GLOBAL, fails, NULL, &graph), INVALID_STATE, "returned 77");
    REFUSED(highwater_capture(stream, HIGHWATER_CAPTURE_GLOBAL, fails, stream, &graph), INVALID_ARGUMENT, "highwater_stream_synchronize");
    EXPECT(graph == NULL);
    OK(highwater_stream_synchronize(stream));
}

static void tickets(void) {
    highwater_buffer *buffer = NULL, *opened = NULL;
    char *ticket = NULL;
    highwater_owner *owner = NULL;
    OK(highwater_device_allocate(device, 8, &buffer));
    REFUSED(highwater_buffer_share(buffer, &ticket), INVALID_ARGUMENT, "highwater_device_allocate_shared");
    OK(highwater_buffer_release(&buffer));
    OK(highwater_device_allocate_shared(device, 8, &buffer));
    OK(highwater_buffer_share(buffer, &ticket));
    REFUSED(highwater_ticket_open(runtime, NULL, 0, &opened), INVALID_ARGUMENT, "the ticket is null");
    REFUSED(highwater_ticket_open(runtime, "", 0, &opened), INVALID_ARGUMENT, "the ticket is empty, expected the text of highwater_buffer_share");
    REFUSED(highwater_ticket_open(runtime, "\n", 0, &opened), INVALID_ARGUMENT, "the ticket is empty");
    REFUSED(highwater_ticket_open(runtime, "nonsense", 0, &opened), INVALID_ARGUMENT, "");
    REFUSED(highwater_ticket_open(runtime, ticket, 3, &opened), INVALID_ARGUMENT, "owner_death is 3");
    OK(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_RELEASE, &opened));
    REFUSED(highwater_buffer_owner(opened, &owner), INVALID_ARGUMENT, "this process owns the memory");
    REFUSED(highwater_buffer_owner(opened, NULL), INVALID_ARGUMENT, "the place for the highwater_owner");
    EXPECT(owner == NULL);
    OK(highwater_buffer_release(&opened));
    OK(highwater_buffer_release(&buffer));
    highwater_text_release(&ticket);
}

/* Page-locked memory of two runtimes: one copy, written before its first share alone. */
static void shared_pinned(void) {
    highwater_pinned *made = NULL, *opened = NULL, *pooled = NULL;
    highwater_buffer *buffer = NULL;
    highwater_owner *owner = NULL;
    char *ticket = NULL;
    void *data = NULL, *seen = NULL;
    size_t count = 0;
    unsigned char found[2] = {0};
    OK(highwater_pinned_allocate(runtime, 8, &pooled));
    REFUSED(highwater_pinned_share(pooled, false, &ticket), INVALID_ARGUMENT, "the memory is from the pool");
    OK(highwater_pinned_release(&pooled));
    REFUSED(highwater_pinned_allocate_shared(runtime, SIZE_MAX, &made), INVALID_ARGUMENT, "");
    OK(highwater_pinned_allocate_shared(runtime, 8, &made));
    OK(highwater_pinned_bytes(made, &count));
    OK(highwater_pinned_data(made, &data));
    EXPECT(count == 8 && ((unsigned char *)data)[7] == 0);
    OK(highwater_device_allocate(device, 8, &buffer));
    OK(highwater_fill(stream, buffer, 0, 8, 4));
    OK(highwater_copy_to_host(stream, buffer, 0, made, 4, 4));
    OK(highwater_pinned_wait(made, true));
    ((unsigned char *)data)[0] = 9;
    REFUSED(highwater_pinned_share(made, false, NULL), INVALID_ARGUMENT, "the place for the ticket");
    OK(highwater_pinned_share(made, false, &ticket));
    REFUSED(highwater_pinned_wait(made, true), INVALID_STATE, "read-only");
    REFUSED(highwater_copy_to_host(stream, buffer, 0, made, 0, 4), INVALID_STATE, "fill the buffer before its first highwater_pinned_share");
    char *writable = NULL;
    REFUSED(highwater_pinned_share(made, true, &writable), INVALID_STATE, "");
    REFUSED(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_KEEP, &buffer), INVALID_ARGUMENT, "open it with highwater_pinned_open");

    highwater_runtime *other = NULL;
    highwater_device *other_device = NULL;
    highwater_stream *other_stream = NULL;
    highwater_buffer *copy = NULL;
    OK(highwater_open(getenv("HIGHWATER_BACKEND"), NULL, &other, NULL));
    OK(highwater_device_get(other, 0, &other_device));
    OK(highwater_stream_create(other_device, &other_stream));
    REFUSED(highwater_pinned_open(other, NULL, HIGHWATER_OWNER_DEATH_KEEP, &opened), INVALID_ARGUMENT, "highwater_pinned_share");
    REFUSED(highwater_pinned_open(other, ticket, HIGHWATER_OWNER_DEATH_RELEASE, &opened), UNSUPPORTED, "");
    REFUSED(highwater_pinned_open(other, ticket, 7, &opened), INVALID_ARGUMENT, "owner_death is 7");
    OK(highwater_pinned_open(other, ticket, HIGHWATER_OWNER_DEATH_KEEP, &opened));
    OK(highwater_pinned_wait(opened, false));
    OK(highwater_pinned_data(opened, &seen));
    EXPECT(((unsigned char *)seen)[0] == 9 && ((unsigned char *)seen)[7] == 4);
    OK(highwater_device_allocate(other_device, 2, &copy));
    OK(highwater_copy_to_device(other_stream, opened, 6, copy, 0, 2));
    OK(highwater_pinned_used_on(opened, other_stream, false));
    OK(highwater_read(other_stream, copy, 0, found, 2));
    EXPECT(found[0] == 4 && found[1] == 4);
    REFUSED(highwater_pinned_used_on(opened, stream, false), INVALID_POINTER, "another runtime");
    REFUSED(highwater_pinned_owner(made, &owner), INVALID_ARGUMENT, "this process owns the memory");
    OK(highwater_pinned_release(&opened));
    OK(highwater_pinned_release(&made));
    OK(highwater_device_pinned_allocate_shared(device, 8, &made));
    OK(highwater_pinned_share(made, true, &writable));
    OK(highwater_pinned_data(made, &data));
    OK(highwater_pinned_open(other, writable, HIGHWATER_OWNER_DEATH_KEEP, &opened));
    OK(highwater_pinned_data(opened, &seen));
    OK(highwater_pinned_wait(opened, true));
    ((unsigned char *)seen)[3] = 5;
    EXPECT(((unsigned char *)data)[3] == 5);
    OK(highwater_pinned_release(&opened));
    OK(highwater_pinned_release(&made));
    highwater_text_release(&ticket);
    highwater_text_release(&writable);
    OK(highwater_buffer_release(&copy));
    OK(highwater_buffer_release(&buffer));
    OK(highwater_stream_release(&other_stream));
    OK(highwater_device_release(&other_device));
    uint64_t live = 1;
    OK(highwater_close(&other, &live));
    EXPECT(live == 0);
}

/* A runtime gives its memory to another one, which answers the ticket from then on. */
static void hand_over(void) {
    const char *backend = getenv("HIGHWATER_BACKEND");
    highwater_runtime *old = NULL, *heir = NULL;
    highwater_device *old_device = NULL, *heir_device = NULL;
    highwater_stream *work = NULL;
    highwater_buffer *made = NULL, *kept = NULL, *opened = NULL;
    char *ticket = NULL;
    unsigned char found = 0;
    OK(highwater_open(backend, NULL, &old, NULL));
    OK(highwater_open(backend, NULL, &heir, NULL));
    OK(highwater_device_get(old, 0, &old_device));
    OK(highwater_device_get(heir, 0, &heir_device));
    REFUSED(highwater_hand_over(NULL, 0), INVALID_ARGUMENT, "the highwater_runtime is null");
    REFUSED(highwater_hand_over(old, 1), INVALID_STATE, "shares no memory");
    OK(highwater_device_allocate_shared(old_device, 8, &made));
    OK(highwater_stream_create(old_device, &work));
    OK(highwater_fill(work, made, 0, 8, 6));
    OK(highwater_stream_release(&work));
    OK(highwater_buffer_share(made, &ticket));
    REFUSED(highwater_hand_over(old, 1), INVALID_STATE, "");
    EXPECT(strcmp(highwater_last_hint(), "open every shared ticket in one process with HIGHWATER_OWNER_DEATH_INHERIT, which must not be stopped (`kill -CONT`)") == 0);
    OK(highwater_ticket_open(heir, ticket, HIGHWATER_OWNER_DEATH_INHERIT, &kept));
    OK(highwater_hand_over(old, 60000));
    OK(highwater_buffer_release(&made));
    OK(highwater_device_release(&old_device));
    OK(highwater_close(&old, NULL));
    OK(highwater_ticket_open(heir, ticket, HIGHWATER_OWNER_DEATH_KEEP, &opened));
    OK(highwater_stream_create(heir_device, &work));
    OK(highwater_read(work, opened, 7, &found, 1));
    EXPECT(found == 6);
    OK(highwater_stream_release(&work));
    OK(highwater_buffer_release(&opened));
    OK(highwater_buffer_release(&kept));
    OK(highwater_device_release(&heir_device));
    OK(highwater_close(&heir, NULL));
    highwater_text_release(&ticket);
}

struct death {
    sem_t called, ended;
    int calls;
};

static void called(void *user) {
    struct death *death = user;
    death->calls++;
    sem_post(&death->called);
}

static void ended(void *user) {
    sem_post(&((struct death *)user)->ended);
}

static int count_of(sem_t *semaphore) {
    int count = -1;
    EXPECT(sem_getvalue(semaphore, &count) == 0);
    return count;
}

static void wait_on(sem_t *semaphore) {
    while (sem_wait(semaphore) != 0) {
        /* A signal came. */
    }
}

/* The exporter ends by a signal, and the importer learns of it in each way and keeps the bytes. */
static void owner_dies(const char *program) {
    int ticket_pipe[2];
    EXPECT(pipe(ticket_pipe) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ticket_pipe[1], STDOUT_FILENO);
        execl("/proc/self/exe", program, "owner", (char *)NULL);
        _exit(1);
    }
    close(ticket_pipe[1]);
    FILE *tickets = fdopen(ticket_pipe[0], "r");
    char ticket[4096], pinned_ticket[4096];
    EXPECT(fgets(ticket, sizeof ticket, tickets) != NULL && fgets(pinned_ticket, sizeof pinned_ticket, tickets) != NULL);
    highwater_buffer *kept = NULL, *revoked = NULL;
    highwater_pinned *pinned = NULL;
    highwater_owner *owner = NULL, *of_pinned = NULL;
    highwater_death_watch *watch = NULL, *cancelled = NULL, *late = NULL;
    struct death death = {.calls = 0}, other = {.calls = 0};
    bool alive = false, dead = true;
    unsigned char found = 0;
    uint32_t pid = 0;
    int descriptor = -1;
    void *data = NULL;
    EXPECT(sem_init(&death.called, 0, 0) == 0 && sem_init(&death.ended, 0, 0) == 0);
    EXPECT(sem_init(&other.called, 0, 0) == 0 && sem_init(&other.ended, 0, 0) == 0);
    OK(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_KEEP, &kept));
    OK(highwater_ticket_open(runtime, ticket, HIGHWATER_OWNER_DEATH_RELEASE, &revoked));
    OK(highwater_pinned_open(runtime, pinned_ticket, HIGHWATER_OWNER_DEATH_KEEP, &pinned));
    OK(highwater_buffer_owner(kept, &owner));
    OK(highwater_pinned_owner(pinned, &of_pinned));
    OK(highwater_owner_pid(owner, &pid));
    EXPECT(pid == (uint32_t)child);
    OK(highwater_owner_pid(of_pinned, &pid));
    EXPECT(pid == (uint32_t)child);
    OK(highwater_owner_is_alive(owner, &alive));
    OK(highwater_owner_wait(owner, 0, &dead));
    EXPECT(alive && !dead);
    REFUSED(highwater_owner_wait(owner, 0, NULL), INVALID_ARGUMENT, "the place for the answer");
    REFUSED(highwater_owner_descriptor(owner, NULL), INVALID_ARGUMENT, "the place for the descriptor");
    REFUSED(highwater_owner_is_alive((highwater_owner *)kept, &alive), INVALID_HANDLE, "expected a live highwater_owner");
    OK(highwater_owner_descriptor(owner, &descriptor));
    struct pollfd end = {.fd = descriptor, .events = POLLIN};
    EXPECT(poll(&end, 1, 0) == 0);
    OK(highwater_owner_on_death(owner, called, &death, ended, &watch));
    OK(highwater_owner_on_death(owner, called, &other, ended, &cancelled));
    OK(highwater_death_watch_release(&cancelled));
    EXPECT(count_of(&other.ended) == 1);
    REFUSED(highwater_owner_on_death(owner, NULL, &other, ended, &cancelled), INVALID_ARGUMENT, "the callback is null");
    EXPECT(count_of(&other.ended) == 2);
    REFUSED(highwater_owner_on_death(owner, called, &other, ended, NULL), INVALID_ARGUMENT, "the place for the highwater_death_watch");
    EXPECT(count_of(&other.ended) == 3 && other.calls == 0 && death.calls == 0);

    EXPECT(kill(child, SIGKILL) == 0);
    wait_on(&death.called);
    REFUSED(highwater_fill(stream, revoked, 0, 8, 1), EXPIRED, "");
    EXPECT(poll(&end, 1, 60000) == 1);
    wait_on(&death.ended);
    EXPECT(death.calls == 1);
    OK(highwater_owner_wait(owner, 60000, &dead));
    EXPECT(dead);
    OK(highwater_owner_is_alive(of_pinned, &alive));
    EXPECT(!alive);
    /* A watch of a dead owner is called, too. */
    OK(highwater_owner_on_death(of_pinned, called, &death, NULL, &late));
    wait_on(&death.called);
    EXPECT(count_of(&death.ended) == 0 && other.calls == 0);
    OK(highwater_read(stream, kept, 7, &found, 1));
    OK(highwater_pinned_data(pinned, &data));
    EXPECT(found == 3 && ((unsigned char *)data)[7] == 8);
    OK(highwater_death_watch_release(&late));
    OK(highwater_death_watch_release(&watch));
    OK(highwater_buffer_release(&kept));
    OK(highwater_buffer_release(&revoked));
    OK(highwater_pinned_release(&pinned));
    OK(highwater_owner_release(&owner));
    OK(highwater_owner_release(&of_pinned));
    EXPECT(close(descriptor) == 0);
    EXPECT(waitpid(child, NULL, 0) == child);
    fclose(tickets);
}

static int own(void) {
    highwater_buffer *buffer = NULL;
    highwater_pinned *pinned = NULL;
    char *ticket = NULL, *pinned_ticket = NULL;
    void *data = NULL;
    OK(highwater_device_allocate_shared(device, 8, &buffer));
    OK(highwater_fill(stream, buffer, 0, 8, 3));
    OK(highwater_buffer_share(buffer, &ticket));
    OK(highwater_pinned_allocate_shared(runtime, 8, &pinned));
    OK(highwater_pinned_data(pinned, &data));
    memset(data, 8, 8);
    OK(highwater_pinned_share(pinned, false, &pinned_ticket));
    printf("%s\n%s\n", ticket, pinned_ticket);
    fflush(stdout);
    pause();
    return 1;
}

/* The functions without a runtime. */
static void standing(void) {
    char *first = highwater_torch_alloc(1000, 0, NULL), *second = highwater_torch_alloc(1000, 0, NULL);
    EXPECT(first && second && (second >= first + 1000 || first >= second + 1000));
    highwater_torch_record_stream(first, NULL);
    highwater_torch_free(first, 1000, 0, NULL);
    char *again = highwater_torch_alloc(1000, 0, NULL);
    EXPECT(again == first); /* From the pool of the stream. */
    EXPECT(highwater_torch_alloc(0, 0, NULL) == NULL);
    uint64_t raw = 0;
    highwater_stream *of_thread = NULL;
    OK(highwater_stream_per_thread_default(device, &of_thread));
    OK(highwater_stream_raw(of_thread, &raw));
    EXPECT(highwater_torch_alloc(8, 0, (void *)(uintptr_t)raw) == NULL);
    /* On CUDA the number names it in every runtime. Each runtime of the mock has a device of its own. */
    EXPECT(strstr(highwater_last_error(), raw == 2 ? "ordered by a per-thread default stream" : "not a live stream"));
    OK(highwater_stream_release(&of_thread));
    EXPECT(highwater_torch_alloc(8, 99, NULL) == NULL && strstr(highwater_last_error(), "99"));
    EXPECT(highwater_torch_alloc(-1, 0, NULL) == NULL && strstr(highwater_last_error(), "highwater_torch_alloc: invalid argument: the number of bytes is -1"));
    highwater_torch_free(again, 1000, 0, NULL);
    highwater_torch_free(second, 1000, 0, NULL);
    highwater_torch_free(NULL, 0, 0, NULL);
    highwater_torch_free(second, 1000, 0, NULL);
    EXPECT(strstr(highwater_last_error(), "highwater_torch_free: invalid pointer"));
    highwater_torch_record_stream(second, NULL);
    EXPECT(strstr(highwater_last_error(), "highwater_torch_record_stream: invalid pointer"));

    char *pinned = highwater_pinned_malloc(1000);
    EXPECT(pinned && (uintptr_t)pinned % 256 == 0);
    memset(pinned, 1, 1000);
    highwater_pinned_free(pinned + 1);
    EXPECT(strstr(highwater_last_error(), "highwater_pinned_free: invalid pointer"));
    highwater_pinned_free(pinned);
    highwater_pinned_free(NULL);
    EXPECT(highwater_pinned_malloc(0) == NULL);
    EXPECT(highwater_pinned_malloc(SIZE_MAX) == NULL);
}

/* Without a device, the functions without a runtime name the remedy that they have. */
static int without_device(void) {
    const char *remedy = "set HIGHWATER_BACKEND=mock, to compute on the CPU";
    EXPECT(highwater_pinned_malloc(8) == NULL && strcmp(highwater_last_hint(), remedy) == 0);
    EXPECT(highwater_torch_alloc(8, 0, NULL) == NULL && strcmp(highwater_last_hint(), remedy) == 0);
    REFUSED(highwater_open(NULL, NULL, &runtime, NULL), DEVICE_MISSING, "set highwater_open_options.fallback_to_mock, or pass \"mock\"");
    puts("no device");
    return 0;
}

/* Every call of a forked child is refused, and releases do nothing. */
static void forked(void) {
    pid_t child = fork();
    if (child == 0) {
        highwater_stream *copy = stream;
        highwater_buffer *buffer = NULL;
        REFUSED(highwater_stream_synchronize(stream), FORKED, "start the child with exec, and open a runtime in the new program");
        EXPECT(strstr(highwater_last_error(), "in the child") == NULL);
        REFUSED(highwater_device_allocate(device, 8, &buffer), FORKED, "fork");
        highwater_pinned *pinned = NULL;
        REFUSED(highwater_pinned_allocate(runtime, 8, &pinned), FORKED, "fork");
        REFUSED(highwater_device_pinned_allocate(device, 8, &pinned), FORKED, "fork");
        REFUSED(highwater_blas_enqueue(stream, enqueues, NULL), FORKED, "fork");
        EXPECT(pinned == NULL);
        OK(highwater_stream_release(&copy));
        EXPECT(highwater_torch_alloc(8, 0, NULL) == NULL && strstr(highwater_last_error(), "fork"));
        EXPECT(highwater_pinned_malloc(8) == NULL && strstr(highwater_last_error(), "fork"));
        _exit(0);
    }
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    OK(highwater_stream_synchronize(stream));
}

static highwater_stream *of_main_thread;

static void *other_thread(void *unused) {
    (void)unused;
    EXPECT(strlen(highwater_last_error()) == 0);
    REFUSED(highwater_stream_synchronize(of_main_thread), INVALID_STATE, "or share a stream of highwater_stream_create");
    for (int i = 0; i < 50; i++) {
        highwater_buffer *buffer = NULL;
        highwater_pinned *pinned = NULL;
        unsigned char found = 0;
        OK(highwater_stream_allocate(stream, 64, &buffer));
        OK(highwater_pinned_allocate(runtime, 64, &pinned));
        OK(highwater_fill(stream, buffer, 0, 64, (uint8_t)i));
        OK(highwater_copy_to_host(stream, buffer, 0, pinned, 0, 64));
        OK(highwater_read(stream, buffer, 63, &found, 1));
        EXPECT(found == i);
        OK(highwater_pinned_release(&pinned));
        OK(highwater_buffer_release(&buffer));
    }
    return NULL;
}

/* Several threads use one stream. Each has an error of its own. */
static void threads(void) {
    pthread_t all[4];
    OK(highwater_stream_per_thread_default(device, &of_main_thread));
    REFUSED(highwater_stream_synchronize(NULL), INVALID_ARGUMENT, "null");
    for (int i = 0; i < 4; i++) {
        EXPECT(pthread_create(&all[i], NULL, other_thread, NULL) == 0);
    }
    for (int i = 0; i < 4; i++) {
        EXPECT(pthread_join(all[i], NULL) == 0);
    }
    EXPECT(strlen(highwater_last_error()) > 0);
    OK(highwater_stream_release(&of_main_thread));
}

int main(int count, char **arguments) {
    const char *backend = getenv("HIGHWATER_BACKEND");
    char *text = NULL;
    uint32_t devices = 0;
    uint64_t unused_bytes = 0, all_bytes = 0, live = 1;
    statuses();
    if (count > 1 && strcmp(arguments[1], "without device") == 0) {
        return without_device();
    }
    OK(highwater_open(backend, NULL, &runtime, &text));
    EXPECT(strstr(text, "\"taken\":\"") != NULL);
    highwater_text_release(&text);
    OK(highwater_device_count(runtime, &devices));
    EXPECT(devices >= 1);
    OK(highwater_device_get(runtime, 0, &device));
    OK(highwater_stream_create(device, &stream));
    if (count > 1) {
        return own();
    }
    OK(highwater_device_describe(device, &text));
    EXPECT(strstr(text, "\"abilities\":{") != NULL && strstr(text, "\"ordinal\":0") != NULL);
    highwater_text_release(&text);
    OK(highwater_device_memory(device, &unused_bytes, &all_bytes));
    EXPECT(unused_bytes > 0 && unused_bytes <= all_bytes);
    opening();
    handles();
    memory();
    rows();
    adopted();
    streams();
    products();
    graphs();
    tickets();
    shared_pinned();
    hand_over();
    owner_dies(arguments[0]);
    standing();
    forked();
    threads();

    /* A runtime with live objects does not close, and ends with the last of them. */
    REFUSED(highwater_close(&runtime, &live), INVALID_STATE, "alive");
    EXPECT(strcmp(highwater_last_hint(), "release the handles of its devices, streams, events and buffers first") == 0);
    EXPECT(runtime == NULL && live == 1);
    OK(highwater_close(&runtime, &live));

    OK(highwater_stream_release(&stream));
    OK(highwater_device_release(&device));
    puts("the rules hold");
    return 0;
}
