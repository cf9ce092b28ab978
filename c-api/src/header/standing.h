
/* The functions below have no runtime among their arguments. They use one that the first call opens, and that lives as long as the process:
 * the backend that HIGHWATER_BACKEND names, else the best real device. After an error they return null, or do nothing, and
 * highwater_last_error returns the message. They return null for 0 bytes, and accept null as an address to free. */

/* For torch.cuda.memory.CUDAPluggableAllocator: allocates device memory from the pool of a stream. Null is the legacy default stream. A
 * per-thread default stream is refused. Every other stream must live as long as the process, as PyTorch's do. */
void *highwater_torch_alloc(ptrdiff_t bytes, int device, void *stream);

/* Frees memory of highwater_torch_alloc. Does not wait: it is reused after the work of its streams. */
void highwater_torch_free(void *address, ptrdiff_t bytes, int device, void *stream);

/* Notes that a stream other than the first uses the memory, before the work is enqueued. PyTorch's set_record_stream_fn takes it. */
void highwater_torch_record_stream(void *address, void *stream);

/* Allocates page-locked memory in one registration, aligned to 256 bytes. */
void *highwater_pinned_malloc(size_t bytes);

/* Frees memory of highwater_pinned_malloc. No work may use it any more: Highwater does not see copies that other code enqueues. */
void highwater_pinned_free(void *address);
