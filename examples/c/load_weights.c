/* Loads the tensors of a file onto a device, as llama.cpp does: reads pieces into two pinned blocks in turn, so that the file is read
 * while the copy before is under way. */
#include "check.h"

enum { TENSORS = 3, PIECE = 1 << 20 };

static const size_t sizes[TENSORS] = {3 * PIECE + 17, PIECE, 5};

static unsigned char byte_of(size_t tensor, size_t index) {
    return (unsigned char)(31 * tensor + index % 251);
}

/* Writes the file that a real program has. */
static FILE *make_file(void) {
    FILE *file = tmpfile();
    EXPECT(file != NULL);
    for (size_t tensor = 0; tensor < TENSORS; tensor++) {
        for (size_t i = 0; i < sizes[tensor]; i++) {
            EXPECT(fputc(byte_of(tensor, i), file) != EOF);
        }
    }
    rewind(file);
    return file;
}

int main(void) {
    highwater_runtime *runtime = open_any();
    highwater_device *device = NULL;
    highwater_stream *stream = NULL;
    highwater_buffer *tensors[TENSORS] = {0};
    highwater_pinned *blocks[2] = {0};
    void *data[2];
    CHECK(highwater_device_get(runtime, 0, &device));
    CHECK(highwater_stream_create(device, &stream));
    for (int i = 0; i < 2; i++) {
        CHECK(highwater_device_pinned_allocate(device, PIECE, &blocks[i]));
        CHECK(highwater_pinned_data(blocks[i], &data[i]));
    }

    FILE *file = make_file();
    int turn = 0;
    for (size_t tensor = 0; tensor < TENSORS; tensor++) {
        CHECK(highwater_device_allocate(device, sizes[tensor], &tensors[tensor]));
        for (size_t done = 0; done < sizes[tensor]; turn = !turn) {
            size_t bytes = sizes[tensor] - done < PIECE ? sizes[tensor] - done : PIECE;
            CHECK(highwater_pinned_wait(blocks[turn], true)); /* The copy from this block, two pieces ago. */
            EXPECT(fread(data[turn], 1, bytes, file) == bytes);
            CHECK(highwater_copy_to_device(stream, blocks[turn], 0, tensors[tensor], done, bytes));
            done += bytes;
        }
    }
    fclose(file);
    /* The blocks go back to the pool at once, and are reused after the last copy. */
    CHECK(highwater_pinned_release(&blocks[0]));
    CHECK(highwater_pinned_release(&blocks[1]));

    for (size_t tensor = 0; tensor < TENSORS; tensor++) {
        unsigned char *found = malloc(sizes[tensor]);
        EXPECT(found != NULL);
        CHECK(highwater_read(stream, tensors[tensor], 0, found, sizes[tensor]));
        for (size_t i = 0; i < sizes[tensor]; i++) {
            EXPECT(found[i] == byte_of(tensor, i));
        }
        free(found);
        CHECK(highwater_buffer_release(&tensors[tensor]));
    }
    printf("%d tensors are on the device\n", TENSORS);
    CHECK(highwater_stream_release(&stream));
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    return 0;
}
