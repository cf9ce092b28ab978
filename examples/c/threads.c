/* Shares one device between threads: each has a stream, handles come from the pool, and the weight is uploaded once. */
#include "check.h"

#include <pthread.h>

enum { THREADS = 4 };

static highwater_device *device;
static highwater_buffer *weight;
static highwater_event *uploaded;

static void *layer(void *argument) {
    float *value = argument;
    highwater_stream *stream = NULL;
    highwater_buffer *input = NULL, *output = NULL;
    CHECK(highwater_stream_create(device, &stream));
    CHECK(highwater_stream_wait(stream, uploaded)); /* The device waits, not this thread. */
    CHECK(highwater_stream_allocate(stream, sizeof *value, &input));
    CHECK(highwater_stream_allocate(stream, sizeof *value, &output));
    CHECK(highwater_write(stream, value, input, 0, sizeof *value));
    highwater_gemm gemm = {
        .size = sizeof gemm, .m = 1, .n = 1, .k = 1, .alpha = 1, .a = weight, .b = input, .c = output};
    CHECK(highwater_gemm_run(stream, &gemm));
    CHECK(highwater_read(stream, output, 0, value, sizeof *value));
    CHECK(highwater_buffer_release(&input));
    CHECK(highwater_buffer_release(&output));
    CHECK(highwater_stream_release(&stream));
    return NULL;
}

int main(void) {
    highwater_runtime *runtime = open_any();
    highwater_stream *uploads = NULL;
    const float three = 3;
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &uploads));
    CHECK(highwater_device_allocate(device, sizeof three, &weight));
    CHECK(highwater_write(uploads, &three, weight, 0, sizeof three));
    CHECK(highwater_stream_record(uploads, &uploaded));

    pthread_t threads[THREADS];
    float values[THREADS];
    for (int i = 0; i < THREADS; i++) {
        values[i] = (float)i;
        EXPECT(pthread_create(&threads[i], NULL, layer, &values[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        EXPECT(pthread_join(threads[i], NULL) == 0);
        EXPECT(values[i] == 3 * (float)i);
    }
    char *statistics = NULL;
    CHECK(highwater_statistics(runtime, &statistics));
    printf("%s\n", statistics);
    highwater_text_release(&statistics);

    CHECK(highwater_event_release(&uploaded));
    CHECK(highwater_buffer_release(&weight));
    CHECK(highwater_stream_release(&uploads));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
