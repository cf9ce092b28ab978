//! Every clause of the traits: what a backend promises, in the words of the documentation.
//!
//! The documentation of `highwater_core`'s traits is where clauses are written; this table is a copy that programs can
//! read, for reports that say what was expected and for certificates. A test holds the two together.

use crate::cases::cases;

/// One promise of the traits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Clause {
    /// What cases name it by: `stream.order`.
    pub id: &'static str,
    /// The trait that promises it.
    pub of: &'static str,
    /// The promise, in the words of the documentation.
    pub promise: &'static str,
}

/// Every clause, in the order of the traits.
#[must_use]
pub fn clauses() -> &'static [Clause] {
    &CLAUSES
}

/// The clauses that no case proves.
#[must_use]
pub fn clauses_without_case() -> Vec<&'static Clause> {
    CLAUSES.iter().filter(|clause| !cases().any(|case| case.clauses.contains(&clause.id))).collect()
}

const fn clause(of: &'static str, id: &'static str, promise: &'static str) -> Clause {
    Clause { id, of, promise }
}

static CLAUSES: [Clause; 101] = [
    clause(
        "Backend",
        "backend.ids-checked",
        "a stale, foreign or forged id gives `InvalidHandle`, and nothing happens.",
    ),
    clause("Backend", "backend.device-checked", "an ordinal not below `device_count` gives `InvalidArgument`."),
    clause("Backend", "backend.lacking", "what a capability denies gives `Unsupported`, and nothing happens."),
    clause("Backend", "backend.concurrent", "calls from several threads at once do not disturb each other."),
    clause("Backend", "backend.live-objects", "what is made counts in `live_objects` until it is destroyed."),
    clause("Backend", "backend.forked", "in a child forked after the backend was opened, calls give `Forked` at once."),
    clause("Backend", "identity.stable", "the same value every time."),
    clause("Backend", "identity.tagged", "every id that the backend issues carries `identity().tag`."),
    clause("Backend", "devices.some", "at least 1 (a backend without a device does not open)."),
    clause("Backend", "devices.uuid", "the UUID is stable over the life of the machine, and no two devices share one."),
    clause("Backend", "devices.capabilities-stable", "the same value every time."),
    clause("Backend", "memory.info", "`free <= total`, and `total` is `device_info().memory_bytes`."),
    clause("Backend", "stream.order", "what is enqueued on one stream is executed in the order of the calls."),
    clause("Backend", "stream.asynchronous", "enqueueing returns without waiting for what was enqueued before."),
    clause("Backend", "stream.independent", "streams of one device do not wait for each other unless told to."),
    clause("Backend", "stream.destroy-pending", "what was enqueued is still executed."),
    clause("Backend", "stream.destroy-stale", "from here on the id is stale, also for a second `destroy_stream`."),
    clause("Backend", "stream.query", "`Pending` while work is outstanding, `Complete` after it."),
    clause("Backend", "stream.synchronize", "on return the effects of that work are visible to the CPU."),
    clause(
        "Backend",
        "devices.synchronize",
        "on return the work enqueued on any stream of the device has been executed.",
    ),
    clause(
        "Backend",
        "event.wait-orders",
        "work enqueued after the wait runs after the work before the record, also across devices.",
    ),
    clause("Backend", "event.wait-snapshot", "a record made after the call is not waited for."),
    clause("Backend", "event.never-recorded", "waiting for an event that was never recorded is no wait and no error."),
    clause("Backend", "event.destroy-pending", "a record or a wait already enqueued keeps its effect."),
    clause("Backend", "event.destroy-stale", "from here on the id is stale."),
    clause("Backend", "event.record-moves", "a further record replaces the point; the earlier one is forgotten."),
    clause("Backend", "event.record-device", "a stream of another device than the event's gives `WrongDevice`."),
    clause("Backend", "event.query", "`Pending` until the stream has passed the record, then `Complete`."),
    clause("Backend", "event.query-never-recorded", "`Complete` for an event that was never recorded."),
    clause(
        "Backend",
        "event.synchronize",
        "on return the effects of the work before the record are visible to the CPU.",
    ),
    clause("Backend", "event.elapsed", "at least the time that the device spent between them."),
    clause(
        "Backend",
        "event.elapsed-invalid",
        "an event without timing or never recorded gives `InvalidArgument`, one not reached yet `InvalidState`.",
    ),
    clause("Backend", "memory.aligned", "the address is a multiple of 256."),
    clause("Backend", "memory.disjoint", "blocks that are alive do not overlap."),
    clause("Backend", "memory.zero", "0 bytes give `InvalidArgument`."),
    clause("Backend", "memory.exhausted", "more than there is gives `OutOfMemory`, and nothing changes."),
    clause(
        "Backend",
        "memory.stream-ordered",
        "work enqueued on a block's stream after the allocation has the bytes to itself, and so has work that waits for an event recorded there after it.",
    ),
    clause(
        "Backend",
        "memory.free-returns",
        "freed bytes can be allocated again (stream-ordered ones once the stream is past).",
    ),
    clause(
        "Backend",
        "copy.exact",
        "exactly `bytes` bytes arrive, unchanged; bytes beside the destination keep their value.",
    ),
    clause("Backend", "copy.ordered", "the copy runs in the order of the stream."),
    clause("Backend", "copy.zero", "0 bytes copy nothing and give no error."),
    clause("Backend", "fill.exact", "exactly `count` elements are written, with each width of pattern."),
    clause("Backend", "fill.ordered", "the fill runs in the order of the stream."),
    clause("Backend", "fill.zero", "0 elements fill nothing and give no error."),
    clause("Backend", "capture.not-executed", "nothing enqueued during the capture is executed."),
    clause("Backend", "capture.begin-again", "beginning on a stream that takes part in a capture gives `Capture`."),
    clause(
        "Backend",
        "capture.joins",
        "a stream that waits for an event recorded in the capture takes part in it from there on.",
    ),
    clause(
        "Backend",
        "capture.undisturbed",
        "allocating and freeing plain memory and page-locked memory, registering and unregistering memory, exporting, opening and closing memory that processes share, creating and destroying events, asking and waiting for events that were recorded outside and for streams that take no part, and making handles (where `create_during_capture` holds) neither fail nor disturb the capture, from whichever thread and in whichever mode.",
    ),
    clause(
        "Backend",
        "capture.no-answer",
        "asking or waiting for a stream that takes part, or an event recorded in the capture, gives `Capture`; the capture may be lost by it.",
    ),
    clause(
        "Backend",
        "capture.lost",
        "a capture that was lost gives `Capture`; afterwards the stream works as before.",
    ),
    clause(
        "Backend",
        "capture.unjoined",
        "where a stream that joined was not waited for by the first one, `Capture`, and the capture is lost.",
    ),
    clause("Backend", "capture.end-without", "a stream without a capture gives `Capture`, and nothing changes."),
    clause(
        "Backend",
        "capture.replay",
        "every launch executes all recorded operations once, in the order of the stream, also those of the streams that joined, in the order that their events gave.",
    ),
    clause("Backend", "capture.by-value", "addresses and scalars are those of the time of recording."),
    clause(
        "Backend",
        "blas.create-concurrent",
        "making one handle does not delay calls on other handles, streams or devices.",
    ),
    clause("Backend", "ipc.offered", "`Some` exactly where a device's `ipc_transports` is not empty."),
    clause(
        "BlasHandle",
        "blas.kind",
        "what belongs to the other kind (products for `Lt`, plans for `Blas`) gives `Unsupported`.",
    ),
    clause("BlasHandle", "blas.stream-bound", "products run in the order of the bound stream."),
    clause("BlasHandle", "blas.stream-device", "a stream of another device gives `WrongDevice`."),
    clause(
        "BlasHandle",
        "blas.stream-resets-workspace",
        "where the fact `set_stream_resets_workspace` holds, the handle is back on its own workspace, also when the stream is the same; modes survive.",
    ),
    clause("BlasHandle", "blas.workspace-used", "products keep their intermediate results in the bound workspace."),
    clause(
        "BlasHandle",
        "blas.workspace-alignment",
        "an address that is not a multiple of `workspace_alignment` gives `InvalidArgument`.",
    ),
    clause("BlasHandle", "blas.deterministic", "with `NotAllowed`, equal calls give equal bits."),
    clause(
        "BlasHandle",
        "gemm.value",
        "every element of C is the product within the rounding of C's type. NaN and infinity in A, B and C reach the elements that they enter, and no others. Before it is added to `beta * C`, the product may be rounded to that type.",
    ),
    clause("BlasHandle", "gemm.transpose", "for each combination of transposed factors."),
    clause(
        "BlasHandle",
        "gemm.leading-dimension",
        "elements between the rows of C and the leading dimension keep their value.",
    ),
    clause("BlasHandle", "gemm.beta", "the old C enters with factor beta."),
    clause("BlasHandle", "gemm.beta-zero", "with beta 0 the old C is not read (NaN there does not matter)."),
    clause("BlasHandle", "gemm.alpha-zero", "with alpha 0 or k 0, A and B do not matter."),
    clause("BlasHandle", "gemm.empty", "with m, n or the batch 0 nothing is written, and it is no error."),
    clause("BlasHandle", "gemm.strided-batch", "the products of a batch are independent and lie at the strides given."),
    clause(
        "BlasHandle",
        "gemm.mixed",
        "with factors of `F16` or `Bf16` and an output of `F32`, C is an `F32` matrix, of which the old values enter and the product is stored without a rounding to the factors' type; the sum is kept in 32 bits, and whatever else is said of C holds. Needs `gemm_mixed`.",
    ),
    clause(
        "BlasHandle",
        "gemm.mixed-pairs",
        "every other pair of different types gives `Unsupported`, as a GEMM and as a plan, and nothing is written.",
    ),
    clause("BlasHandle", "gemm.asynchronous", "the call returns without waiting for the product."),
    clause(
        "BlasHandle",
        "plan.value",
        "D is `epilogue(alpha * op(A) * op(B) + beta * C)` within the rounding of D's type. Before an epilogue, `alpha * op(A) * op(B)` and its sum with C may be rounded to that type.",
    ),
    clause("BlasHandle", "plan.epilogue", "for each epilogue; the bias is added to every column."),
    clause(
        "BlasHandle",
        "plan.alpha-zero",
        "with alpha 0 or k 0, A and B do not matter: D is `epilogue(beta * C)`, with the bias that the epilogue adds.",
    ),
    clause(
        "BlasHandle",
        "plan.mixed",
        "as `gemm.mixed`; C, D and the bias are of the output's type, and no sum is rounded to the factors' type on the way.",
    ),
    clause("BlasHandle", "plan.stale", "a destroyed or unknown plan gives `InvalidHandle`."),
    clause(
        "BlasHandle",
        "plan.alignment",
        "an operand that is not aligned as the plan says, or to its own elements, gives `InvalidArgument`.",
    ),
    clause(
        "BlasHandle",
        "blas.reset",
        "later products are as those of a fresh handle; a stream and a workspace are bound anew before.",
    ),
    clause("BlasHandle", "blas.destroyed", "`live_objects().handles` goes down by one, after `destroy` or drop."),
    clause(
        "HostAllocator",
        "host.usable",
        "the CPU can read and write every byte; every device can copy to and from it.",
    ),
    clause("HostAllocator", "host.aligned", "the address is a multiple of 64."),
    clause("HostAllocator", "host.zero", "0 bytes give `InvalidArgument`."),
    clause("HostAllocator", "host.exhausted", "more than there is gives `OutOfMemory`, and nothing changes."),
    clause("HostAllocator", "host.free-counts", "`live_objects().host_allocations` goes down by one."),
    clause(
        "HostAllocator",
        "host.register-copies",
        "within one registration, registered memory is copied as allocated memory is, from its first byte to its last; from one registration into another that touches it, no copy has to work.",
    ),
    clause(
        "HostAllocator",
        "host.register-overlap",
        "a range that overlaps one already registered gives `InvalidArgument`.",
    ),
    clause(
        "HostAllocator",
        "host.unregister-unknown",
        "an address that `register` was not called with gives `InvalidPointer`.",
    ),
    clause(
        "HostAllocator",
        "host.device-address",
        "the CPU's address where the fact `host_address_is_device_address` holds.",
    ),
    clause(
        "IpcSharing",
        "ipc.shared-bytes",
        "what one process writes to the memory the other reads, and the other way round.",
    ),
    clause(
        "IpcSharing",
        "ipc.export-shareable",
        "memory not allocated as `Shareable` by this transport gives `InvalidArgument`.",
    ),
    clause(
        "IpcSharing",
        "ipc.export-transport",
        "a transport outside the capability `ipc_transports` gives `Unsupported`.",
    ),
    clause("IpcSharing", "ipc.open-again", "a second open for the same device gives the same address and is counted."),
    clause(
        "IpcSharing",
        "ipc.open-outlives",
        "with [`Transport::Descriptor`] the mapping keeps the memory when its exporter has ended.",
    ),
    clause(
        "IpcSharing",
        "ipc.open-checked",
        "a handle that no exporter made, of another device's UUID or without the descriptor that its transport needs, gives `InvalidArgument`, and nothing is mapped.",
    ),
    clause("IpcSharing", "ipc.close-unknown", "an address that is not open gives `InvalidPointer`."),
    clause("IpcSharing", "ipc.export-event", "an event made without `interprocess` gives `InvalidArgument`."),
    clause(
        "IpcSharing",
        "ipc.event-orders",
        "work that waits for the opened event runs after the other process's work before the record.",
    ),
    clause(
        "IpcSharing",
        "ipc.event-peer-ends",
        "where the fact `event_waits_end_with_peer` holds, waits end when the recording process ends before the record is reached.",
    ),
];
