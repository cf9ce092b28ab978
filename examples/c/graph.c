/* Records a copy and a fill once, and launches them twice. */
#include "check.h"

struct work {
    highwater_stream *stream;
    highwater_pinned *input;
    highwater_buffer *buffer;
};

static highwater_status record(void *user) {
    struct work *work = user;
    highwater_status status = highwater_copy_to_device(work->stream, work->input, 0, work->buffer, 0, 4);
    return status != HIGHWATER_OK ? status : highwater_fill(work->stream, work->buffer, 4, 4, 9);
}

int main(void) {
    highwater_runtime *runtime = open_any();
    highwater_device *device = NULL;
    highwater_graph *graph = NULL;
    struct work work = {0};
    void *data = NULL;
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &work.stream));
    CHECK(highwater_pinned_allocate(runtime, 4, &work.input));
    CHECK(highwater_device_allocate(device, 8, &work.buffer));
    CHECK(highwater_pinned_data(work.input, &data));
    CHECK(highwater_capture(work.stream, HIGHWATER_CAPTURE_THREAD_LOCAL, record, &work, &graph));
    for (unsigned char value = 1; value <= 2; value++) {
        unsigned char found[8] = {0};
        CHECK(highwater_pinned_wait(work.input, true)); /* The launch before has read it. */
        for (int i = 0; i < 4; i++) {
            ((unsigned char *)data)[i] = value;
        }
        CHECK(highwater_graph_launch(graph, work.stream));
        CHECK(highwater_read(work.stream, work.buffer, 0, found, sizeof found));
        printf("%d and %d\n", found[0], found[7]);
        EXPECT(found[0] == value && found[7] == 9);
    }
    CHECK(highwater_graph_release(&graph));
    CHECK(highwater_pinned_release(&work.input));
    CHECK(highwater_buffer_release(&work.buffer));
    CHECK(highwater_stream_release(&work.stream));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
