
/* Ends the caller's object that keeps adopted memory. */
typedef void (*highwater_end_callback)(void *user);

/* Uses the vendor's handle. The workspace is a device address; it is 0 if the handle uses memory of its own. */
typedef void (*highwater_blas_callback)(void *user, uint64_t handle, uint64_t workspace, size_t workspace_bytes);

/* Enqueues the work that is recorded. */
typedef highwater_status (*highwater_capture_callback)(void *user);
