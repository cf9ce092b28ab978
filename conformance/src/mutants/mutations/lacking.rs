//! Abilities that are denied and used nevertheless.

use highwater_hal::{ErrorKind, Location};

use super::super::reference::wrong;

/// Denies one ability.
macro_rules! denied {
    ($ability:ident) => {
        |h| h.claim(|capabilities| capabilities.$ability = false)
    };
}

// Each denies one ability, and breaks the method that should refuse to use it.
mutants! {
    in "backend.lacking":
    "batches-denied": "Says that `strided_batch` is false, and multiplies batches." => denied!(strided_batch);
    "doubles-denied": "Says that `gemm_f64` is false, and multiplies 64-bit floats." => denied!(gemm_f64);
    "halves-denied": "Says that `gemm_f16` is false, and multiplies half precision." => denied!(gemm_f16);
    "mixed-types-denied": "Says that `gemm_mixed` is false, and multiplies halves to 32 bits." => denied!(gemm_mixed);
    "tf32-denied": "Says that `tf32` is false, and takes the mode." => denied!(tf32);
    "atomics-denied": "Says that `atomics_mode` is false, and takes the mode." => denied!(atomics_mode);
    "workspaces-denied": "Says that `blas_workspace` is false, and takes a workspace." => denied!(blas_workspace);
    "plans-denied": "Says that `lt_plans` is false, and makes handles of kind Lt." => denied!(lt_plans);
    "captures-denied": "Says that `capture` is false, and captures." => denied!(capture);
    "stream-ordered-memory-denied": "Says that `stream_ordered_memory` is false, and allocates it." =>
        denied!(stream_ordered_memory);
    "shareable-memory-denied": "Says that `shareable_memory` is false, and allocates it." => denied!(shareable_memory);
    "interprocess-events-denied": "Says that `interprocess_events` is false, and makes them." => denied!(interprocess_events);
    "timing-denied": "Says that `event_timing` is false, and makes events with timing." => denied!(event_timing);
    "priorities-denied": "Says that `stream_priority` is false, and makes streams of high priority." =>
        denied!(stream_priority);
    "peer-copies-denied": "Says that `peer_copy` is false, and copies from device to device." => denied!(peer_copy);
    "registration-denied": "Says that `host_register` is false, and registers memory." => denied!(host_register);
    "write-combined-memory-denied": "Says that `write_combined` is false, and allocates it." => denied!(write_combined);
    "the-legacy-stream-denied": "Says that `legacy_default_stream` is false, and uses it." => denied!(legacy_default_stream);
    "the-per-thread-stream-denied": "Says that `per_thread_default_stream` is false, and uses it." =>
        denied!(per_thread_default_stream);
    "foreign-objects-denied": "Says that `foreign_objects` is false, and gives the vendor's handle of a stream." =>
        denied!(foreign_objects);
    "denied-copies-done": "Refuses to copy between devices, and does it." => |h| {
        h.claim(|capabilities| capabilities.peer_copy = false);
        h.backend.copy(|reference, copy, stream| {
            reference.copy(copy, stream)?;
            match (copy.dst, copy.src) {
                (Location::Device { device: to, .. }, Location::Device { device: from, .. }) if to != from => {
                    Err(wrong(ErrorKind::Unsupported, "copy"))
                }
                _ => Ok(()),
            }
        });
    };
    "denied-events-kept": "Refuses to make events with timing, and keeps what it made." => |h| {
        h.claim(|capabilities| capabilities.event_timing = false);
        h.backend.create_event(|reference, device, options| {
            let event = reference.create_event(device, options)?;
            if options.timing { Err(wrong(ErrorKind::Unsupported, "create_event")) } else { Ok(event) }
        });
        h.backend.event_elapsed_ns(|_, _, _| Err(wrong(ErrorKind::Unsupported, "event_elapsed_ns")));
    };
}
