/* Multiplies two matrices on the best device of the machine, or on the mock. */
#include "check.h"

int main(void) {
    highwater_runtime *runtime = open_any();
    highwater_device *device = NULL;
    highwater_stream *stream = NULL;
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &stream));

    const float a[] = {1, 2, 3, 4, 5, 6};    /* 2 x 3, row-major */
    const float b[] = {7, 8, 9, 10, 11, 12}; /* 3 x 2, row-major */
    float c[4] = {0};
    highwater_buffer *on_device_a = NULL, *on_device_b = NULL, *on_device_c = NULL;
    CHECK(highwater_device_allocate(device, sizeof a, &on_device_a));
    CHECK(highwater_device_allocate(device, sizeof b, &on_device_b));
    CHECK(highwater_device_allocate(device, sizeof c, &on_device_c));
    CHECK(highwater_write(stream, a, on_device_a, 0, sizeof a));
    CHECK(highwater_write(stream, b, on_device_b, 0, sizeof b));

    /* BLAS is column-major: for row-major matrices, A and B are exchanged. The handle comes from the pool and goes back. */
    highwater_gemm gemm = {
        .size = sizeof gemm,
        .data_type = HIGHWATER_DATA_TYPE_F32,
        .output_type = HIGHWATER_DATA_TYPE_F32,
        .m = 2,
        .n = 2,
        .k = 3,
        .alpha = 1,
        .a = on_device_b,
        .b = on_device_a,
        .c = on_device_c,
    };
    CHECK(highwater_gemm_run(stream, &gemm));
    CHECK(highwater_read(stream, on_device_c, 0, c, sizeof c));
    printf("[%g, %g, %g, %g]\n", c[0], c[1], c[2], c[3]);
    EXPECT(c[0] == 58 && c[1] == 64 && c[2] == 139 && c[3] == 154);

    CHECK(highwater_buffer_release(&on_device_a));
    CHECK(highwater_buffer_release(&on_device_b));
    CHECK(highwater_buffer_release(&on_device_c));
    CHECK(highwater_stream_release(&stream));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
