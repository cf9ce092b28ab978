//! Abilities that are denied and used nevertheless.

use highwater_hal::{ErrorKind, Location};

use super::super::reference::wrong;

/// Denies one ability.
macro_rules! denied {
    ($ability:ident) => {
        |h| h.claim(|capabilities| capabilities.$ability = false)
    };
}

/// Denies one ability of each device but the first.
macro_rules! denied_there {
    ($ability:ident) => {
        |h| h.claim_of_others(|capabilities| capabilities.$ability = false)
    };
}

// Each denies one ability, and breaks the method that should refuse to use it.
mutants! {
    in "backend.lacking":
    "batches-denied" needs [has::strided_batch]: "Reports `strided_batch` as false, and multiplies batches." => denied!(strided_batch);
    "doubles-denied" needs [has::gemm_f64]: "Reports `gemm_f64` as false, and multiplies 64-bit floats." => denied!(gemm_f64);
    "halves-denied" needs [has::gemm_f16]: "Reports `gemm_f16` as false, and multiplies half precision." => denied!(gemm_f16);
    "mixed-types-denied" needs [has::gemm_mixed]: "Reports `gemm_mixed` as false, and multiplies halves to 32 bits." => denied!(gemm_mixed);
    "tf32-denied" needs [has::tf32]: "Reports `tf32` as false, and accepts the mode." => denied!(tf32);
    "atomics-denied" needs [has::atomics_mode]: "Reports `atomics_mode` as false, and accepts the mode." => denied!(atomics_mode);
    "workspaces-denied" needs [has::blas_workspace]: "Reports `blas_workspace` as false, and accepts a workspace." => denied!(blas_workspace);
    "plans-denied" needs [has::lt_plans]: "Reports `lt_plans` as false, and makes handles of kind Lt." => denied!(lt_plans);
    "captures-denied" needs [has::capture]: "Reports `capture` as false, and captures." => denied!(capture);
    "stream-ordered-memory-denied" needs [has::stream_ordered_memory]: "Reports `stream_ordered_memory` as false, and allocates it." =>
        denied!(stream_ordered_memory);
    "shareable-memory-denied" needs [has::shareable_memory]: "Reports `shareable_memory` as false, and allocates it." => denied!(shareable_memory);
    "interprocess-events-denied" needs [has::interprocess_events]: "Reports `interprocess_events` as false, and makes them." => denied!(interprocess_events);
    "timing-denied" needs [has::event_timing]: "Reports `event_timing` as false, and makes events with timing." => denied!(event_timing);
    "priorities-denied" needs [has::stream_priority]: "Reports `stream_priority` as false, and makes streams of high priority." =>
        denied!(stream_priority);
    "peer-copies-denied" needs [TWO_DEVICES, has::peer_copy]: "Reports `peer_copy` as false, and copies from device to device." => denied!(peer_copy);
    "registration-denied" needs [has::host_register]: "Reports `host_register` as false, and registers memory." => denied!(host_register);
    "read-only-registration-denied" needs [has::host_register_read_only]: "Reports `host_register_read_only` as false, and registers such memory." =>
        denied!(host_register_read_only);
    "write-combined-memory-denied" needs [has::write_combined]: "Reports `write_combined` as false, and allocates it." => denied!(write_combined);
    "the-legacy-stream-denied" needs [has::legacy_default_stream]: "Reports `legacy_default_stream` as false, and uses it." => denied!(legacy_default_stream);
    "the-per-thread-stream-denied" needs [has::per_thread_default_stream]: "Reports `per_thread_default_stream` as false, and uses it." =>
        denied!(per_thread_default_stream);
    "foreign-objects-denied" needs [has::foreign_objects]: "Reports `foreign_objects` as false, and returns the vendor's handle of a stream." =>
        denied!(foreign_objects);
    "foreign-memory-denied" needs [has::foreign_memory]: "Reports `foreign_memory` as false, and describes memory." => denied!(foreign_memory);
    "mapped-memory-denied" needs [has::mapped_memory]: "Reports `mapped_memory` as false, and reserves addresses." => |h| h.claim(|capabilities| {
        capabilities.mapped_memory = false;
        capabilities.mapped_memory_granularity = 0;
    });
    "direct-access-denied" needs [has::mapped_memory_rdma]: "Reports `mapped_memory_rdma` as false, and creates such memory." => denied!(mapped_memory_rdma);
    "denied-copies-done" needs [TWO_DEVICES, has::peer_copy]: "Refuses to copy between devices, and does it." => |h| {
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
    "denied-events-kept" needs [has::event_timing]: "Refuses to create events with timing, and keeps the event." => |h| {
        h.claim(|capabilities| capabilities.event_timing = false);
        h.backend.create_event(|reference, device, options| {
            let event = reference.create_event(device, options)?;
            if options.timing { Err(wrong(ErrorKind::Unsupported, "create_event")) } else { Ok(event) }
        });
        h.backend.event_elapsed_ns(|_, _, _| Err(wrong(ErrorKind::Unsupported, "event_elapsed_ns")));
    };
    "doubles-denied-there" needs [TWO_DEVICES, has::gemm_f64]: "Reports `gemm_f64` of the second device as false, and multiplies there." => denied_there!(gemm_f64);
    "tf32-denied-there" needs [TWO_DEVICES, has::tf32]: "Reports `tf32` of the second device as false, and accepts the mode there." => denied_there!(tf32);
    "atomics-denied-there" needs [TWO_DEVICES, has::atomics_mode]: "Reports `atomics_mode` of the second device as false, and accepts the mode there." =>
        denied_there!(atomics_mode);
    "plans-denied-there" needs [TWO_DEVICES, has::lt_plans]: "Reports `lt_plans` of the second device as false, and makes such handles there." =>
        denied_there!(lt_plans);
    "captures-denied-there" needs [TWO_DEVICES, has::capture]: "Reports `capture` of the second device as false, and captures there." => denied_there!(capture);
    "timing-denied-there" needs [TWO_DEVICES, has::event_timing]: "Reports `event_timing` of the second device as false, and times there." => denied_there!(event_timing);
    "priorities-denied-there" needs [TWO_DEVICES, has::stream_priority]: "Reports `stream_priority` of the second device as false, and makes such streams there." =>
        denied_there!(stream_priority);
    "stream-ordered-memory-denied-there" needs [TWO_DEVICES, has::stream_ordered_memory]: "Reports `stream_ordered_memory` of the second device as false, and allocates it there." =>
        denied_there!(stream_ordered_memory);
    "shareable-memory-denied-there" needs [TWO_DEVICES, has::shareable_memory]: "Reports `shareable_memory` of the second device as false, and allocates it there." =>
        denied_there!(shareable_memory);
    "the-legacy-stream-denied-there" needs [TWO_DEVICES, has::legacy_default_stream]: "Reports `legacy_default_stream` of the second device as false, and uses it there." =>
        denied_there!(legacy_default_stream);
    "foreign-memory-denied-there" needs [TWO_DEVICES, has::foreign_memory]: "Reports `foreign_memory` of the second device as false, and describes memory there." =>
        denied_there!(foreign_memory);
}
