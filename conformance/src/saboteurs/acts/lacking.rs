//! Abilities that are denied and used nevertheless.

use highwater_hal::{ErrorKind, Location};

use super::super::Saboteur;
use super::super::honest::wrong;

const CLAUSE: &str = "backend.lacking";

/// Each denies one ability, and breaks the method that should refuse to use it.
pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("batches-denied", CLAUSE, "Says that `strided_batch` is false, and multiplies batches.", |h| {
        h.claim(|capabilities| capabilities.strided_batch = false);
    }),
    Saboteur::new("doubles-denied", CLAUSE, "Says that `gemm_f64` is false, and multiplies 64-bit floats.", |h| {
        h.claim(|capabilities| capabilities.gemm_f64 = false);
    }),
    Saboteur::new("halves-denied", CLAUSE, "Says that `gemm_f16` is false, and multiplies half precision.", |h| {
        h.claim(|capabilities| capabilities.gemm_f16 = false);
    }),
    Saboteur::new(
        "mixed-types-denied",
        CLAUSE,
        "Says that `gemm_mixed` is false, and multiplies halves to 32 bits.",
        |h| {
            h.claim(|capabilities| capabilities.gemm_mixed = false);
        },
    ),
    Saboteur::new("tf32-denied", CLAUSE, "Says that `tf32` is false, and takes the mode.", |h| {
        h.claim(|capabilities| capabilities.tf32 = false);
    }),
    Saboteur::new("atomics-denied", CLAUSE, "Says that `atomics_mode` is false, and takes the mode.", |h| {
        h.claim(|capabilities| capabilities.atomics_mode = false);
    }),
    Saboteur::new("workspaces-denied", CLAUSE, "Says that `blas_workspace` is false, and takes a workspace.", |h| {
        h.claim(|capabilities| capabilities.blas_workspace = false);
    }),
    Saboteur::new("plans-denied", CLAUSE, "Says that `lt_plans` is false, and makes handles of kind Lt.", |h| {
        h.claim(|capabilities| capabilities.lt_plans = false);
    }),
    Saboteur::new("captures-denied", CLAUSE, "Says that `capture` is false, and captures.", |h| {
        h.claim(|capabilities| capabilities.capture = false);
    }),
    Saboteur::new(
        "stream-ordered-memory-denied",
        CLAUSE,
        "Says that `stream_ordered_memory` is false, and allocates it.",
        |h| {
            h.claim(|capabilities| capabilities.stream_ordered_memory = false);
        },
    ),
    Saboteur::new("shareable-memory-denied", CLAUSE, "Says that `shareable_memory` is false, and allocates it.", |h| {
        h.claim(|capabilities| capabilities.shareable_memory = false);
    }),
    Saboteur::new(
        "interprocess-events-denied",
        CLAUSE,
        "Says that `interprocess_events` is false, and makes them.",
        |h| {
            h.claim(|capabilities| capabilities.interprocess_events = false);
        },
    ),
    Saboteur::new("timing-denied", CLAUSE, "Says that `event_timing` is false, and makes events with timing.", |h| {
        h.claim(|capabilities| capabilities.event_timing = false);
    }),
    Saboteur::new(
        "priorities-denied",
        CLAUSE,
        "Says that `stream_priority` is false, and makes streams of high priority.",
        |h| {
            h.claim(|capabilities| capabilities.stream_priority = false);
        },
    ),
    Saboteur::new(
        "peer-copies-denied",
        CLAUSE,
        "Says that `peer_copy` is false, and copies from device to device.",
        |h| {
            h.claim(|capabilities| capabilities.peer_copy = false);
        },
    ),
    Saboteur::new("registration-denied", CLAUSE, "Says that `host_register` is false, and registers memory.", |h| {
        h.claim(|capabilities| capabilities.host_register = false);
    }),
    Saboteur::new(
        "write-combined-memory-denied",
        CLAUSE,
        "Says that `write_combined` is false, and allocates it.",
        |h| {
            h.claim(|capabilities| capabilities.write_combined = false);
        },
    ),
    Saboteur::new(
        "the-legacy-stream-denied",
        CLAUSE,
        "Says that `legacy_default_stream` is false, and uses it.",
        |h| {
            h.claim(|capabilities| capabilities.legacy_default_stream = false);
        },
    ),
    Saboteur::new(
        "the-per-thread-stream-denied",
        CLAUSE,
        "Says that `per_thread_default_stream` is false, and uses it.",
        |h| {
            h.claim(|capabilities| capabilities.per_thread_default_stream = false);
        },
    ),
    Saboteur::new(
        "foreign-objects-denied",
        CLAUSE,
        "Says that `foreign_objects` is false, and gives the vendor's handle of a stream.",
        |h| {
            h.claim(|capabilities| capabilities.foreign_objects = false);
        },
    ),
    Saboteur::new("denied-copies-done", CLAUSE, "Refuses to copy between devices, and does it.", |h| {
        h.claim(|capabilities| capabilities.peer_copy = false);
        h.backend.copy(|honest, copy, stream| {
            honest.copy(copy, stream)?;
            match (copy.dst, copy.src) {
                (Location::Device { device: to, .. }, Location::Device { device: from, .. }) if to != from => {
                    Err(wrong(ErrorKind::Unsupported, "copy"))
                }
                _ => Ok(()),
            }
        });
    }),
    Saboteur::new("denied-events-kept", CLAUSE, "Refuses to make events with timing, and keeps what it made.", |h| {
        h.claim(|capabilities| capabilities.event_timing = false);
        h.backend.create_event(|honest, device, options| {
            let event = honest.create_event(device, options)?;
            if options.timing { Err(wrong(ErrorKind::Unsupported, "create_event")) } else { Ok(event) }
        });
        h.backend.event_elapsed_ns(|_, _, _| Err(wrong(ErrorKind::Unsupported, "event_elapsed_ns")));
    }),
];
