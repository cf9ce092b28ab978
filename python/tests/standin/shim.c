// The C functions of PyTorch that `highwater.torch` uses, for the tensors of the stand-in.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DIMENSIONS = 8 };

typedef struct {
    int64_t storage;
    int64_t dimensions;
    int64_t offset;
    int64_t sizes[MOST_DIMENSIONS];
    int64_t strides[MOST_DIMENSIONS];
    int32_t dtype;
} Tensor;

static int64_t live;
static int64_t calls_left = -1;

// Lets the call after so many calls fail. Negative: none.
void standin_fail_after(int64_t calls) { calls_left = calls; }

static int fails(void) {
    if (calls_left == 0) return 1;
    if (calls_left > 0) calls_left--;
    return 0;
}

// The number of tensors that nothing has deleted.
int64_t standin_live(void) { return live; }

Tensor *standin_new(int64_t storage, int32_t dtype, int64_t dimensions, const int64_t *sizes, const int64_t *strides, int64_t offset) {
    Tensor *tensor = calloc(1, sizeof *tensor);
    if (tensor == NULL || dimensions > MOST_DIMENSIONS) abort();
    tensor->storage = storage;
    tensor->dtype = dtype;
    tensor->dimensions = dimensions;
    tensor->offset = offset;
    memcpy(tensor->sizes, sizes, dimensions * sizeof *sizes);
    memcpy(tensor->strides, strides, dimensions * sizeof *strides);
    live++;
    return tensor;
}

int64_t standin_storage(const Tensor *tensor) { return tensor->storage; }

int64_t standin_dimensions(const Tensor *tensor) { return tensor->dimensions; }

int64_t standin_offset(const Tensor *tensor) { return tensor->offset; }

int32_t aoti_torch_get_dim(const Tensor *tensor, int64_t *dimensions) {
    if (fails()) return 1;
    *dimensions = tensor->dimensions;
    return 0;
}

int32_t aoti_torch_get_dtype(const Tensor *tensor, int32_t *dtype) {
    *dtype = tensor->dtype;
    return 0;
}

int32_t aoti_torch_get_sizes(Tensor *tensor, int64_t **sizes) {
    *sizes = tensor->sizes;
    return 0;
}

int32_t aoti_torch_get_strides(Tensor *tensor, int64_t **strides) {
    *strides = tensor->strides;
    return 0;
}

int32_t aoti_torch_get_storage_offset(const Tensor *tensor, int64_t *offset) {
    if (fails()) return 1;
    *offset = tensor->offset;
    return 0;
}

int32_t aoti_torch__reinterpret_tensor(const Tensor *base, int64_t dimensions, const int64_t *sizes, const int64_t *strides, int64_t offset, Tensor **made) {
    if (fails()) return 1;
    *made = standin_new(base->storage, base->dtype, dimensions, sizes, strides, base->offset + offset);
    return 0;
}

int32_t aoti_torch_delete_tensor_object(Tensor *tensor) {
    live--;
    free(tensor);
    return 0;
}

// The functions that `highwater/torch.py` compiles for a PyTorch with an allocator, and segments that a test allocates and frees.

enum { MOST_SEGMENTS = 64 };

static struct {
    uint64_t address;
    uint64_t bytes;
} segments[MOST_SEGMENTS];
static void (*report)(uint64_t address);

void standin_add_segment(uint64_t address, uint64_t bytes) {
    int place = 0;
    while (segments[place].bytes != 0) {
        if (++place == MOST_SEGMENTS) abort();
    }
    segments[place].address = address;
    segments[place].bytes = bytes;
}

// Forgets a segment, as a free does, after the report.
void standin_free_segment(uint64_t address) {
    if (report != NULL) report(address);
    for (int place = 0; place < MOST_SEGMENTS; place++) {
        if (segments[place].address == address) segments[place].bytes = 0;
    }
}

uint64_t highwater_segment_of(uint64_t address) {
    for (int place = 0; place < MOST_SEGMENTS; place++) {
        if (address - segments[place].address < segments[place].bytes) return segments[place].address;
    }
    return 0;
}

_Bool highwater_watch_segments(void (*freed)(uint64_t address)) {
    report = freed;
    return 1;
}
