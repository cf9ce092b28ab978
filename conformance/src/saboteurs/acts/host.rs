//! Page-locked host memory.

use std::collections::HashSet;
use std::ptr::NonNull;

use highwater_hal::{ErrorKind, HostMemoryKind, HostPtr};

use super::super::Saboteur;
use super::super::honest::{Way, is, wrong};
use super::super::hooks::Hooks;
use super::super::note::Note;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("host-blocks-short", "host.usable", "Page-locks one byte less than it was asked for.", |h| {
        h.host.allocate(|host, bytes, options| {
            // On the same pages, so that the byte is there for the CPU.
            host.allocate(if bytes % 4096 > 1 { bytes - 1 } else { bytes }, options)
        });
    }),
    Saboteur::new(
        "host-memory-of-one-device",
        "host.usable",
        "Copies page-locked memory to the first device only.",
        |h| {
            h.backend.copy(|honest, copy, stream| match Way::of(copy) == Way::ToDevice && stream.device() > 0 {
                true => honest.query_stream(stream).map(drop),
                false => honest.copy(copy, stream),
            });
        },
    ),
    Saboteur::new("host-addresses-off", "host.aligned", "Gives addresses that are no multiple of 64.", |h| {
        shift(h, 32, HostMemoryKind::Default);
    }),
    Saboteur::new(
        "write-combined-off",
        "host.aligned",
        "Gives write-combined memory at addresses that are no multiple of 64.",
        |h| shift(h, 16, HostMemoryKind::WriteCombined),
    ),
    Saboteur::new("no-host-bytes-allocated", "host.zero", "Allocates 0 bytes of page-locked memory.", |h| {
        h.host.allocate(|host, bytes, options| host.allocate(bytes.max(1), options));
    }),
    Saboteur::new(
        "host-exhausted-as-invalid",
        "host.exhausted",
        "Calls more page-locked bytes than there are an invalid argument.",
        |h| {
            h.host.allocate(|host, bytes, options| match host.allocate(bytes, options) {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                    Err(wrong(ErrorKind::InvalidArgument, "allocate"))
                }
                allocated => allocated,
            });
        },
    ),
    Saboteur::new(
        "refused-host-blocks-counted",
        "host.exhausted",
        "Counts page-locked blocks that it could not give.",
        |h| {
            let refused = Note::new(0_u64);
            let seen = refused.clone();
            h.host.allocate(move |host, bytes, options| {
                let allocated = host.allocate(bytes, options);
                seen.set(seen.get() + u64::from(is(&allocated, ErrorKind::OutOfMemory)));
                allocated
            });
            h.count(move |live| live.host_allocations += refused.get());
        },
    ),
    Saboteur::new("host-blocks-kept", "host.free-counts", "Keeps page-locked memory that is freed.", |h| {
        h.host.free(|_, _| Ok(()));
    }),
    Saboteur::new(
        "one-page-registered",
        "host.register-copies",
        "Registers the first page of memory and none of the rest.",
        |h| {
            h.host.register(|host, ptr, bytes, options| host.register(ptr, bytes.min(4096), options));
        },
    ),
    Saboteur::new("registered-short", "host.register-copies", "Leaves the last byte out of a registration.", |h| {
        h.host.register(|host, ptr, bytes, options| host.register(ptr, bytes - usize::from(bytes > 1), options));
    }),
    Saboteur::new("registered-twice", "host.register-overlap", "Takes what is registered already.", |h| {
        let starts = Note::<HashSet<HostPtr>>::default();
        h.host.register(move |host, ptr, bytes, options| {
            let registered = host.register(ptr, bytes, options);
            let again = !starts.with(|starts| starts.insert(ptr));
            if again && is(&registered, ErrorKind::InvalidArgument) { Ok(()) } else { registered }
        });
    }),
    Saboteur::new(
        "registered-inside",
        "host.register-overlap",
        "Takes a range that begins inside one that is registered.",
        |h| {
            let starts = Note::<HashSet<HostPtr>>::default();
            h.host.register(move |host, ptr, bytes, options| {
                let registered = host.register(ptr, bytes, options);
                let inside = starts.with(|starts| starts.insert(ptr));
                if inside && is(&registered, ErrorKind::InvalidArgument) { Ok(()) } else { registered }
            });
        },
    ),
    Saboteur::new("anything-unregistered", "host.unregister-unknown", "Unregisters what was never registered.", |h| {
        h.host.unregister(|host, ptr| {
            let gone = host.unregister(ptr);
            if is(&gone, ErrorKind::InvalidPointer) { Ok(()) } else { gone }
        });
    }),
    Saboteur::new(
        "unregistered-as-invalid",
        "host.unregister-unknown",
        "Calls what was never registered an invalid argument.",
        |h| {
            h.host.unregister(|host, ptr| match host.unregister(ptr) {
                Err(error) if error.kind() == ErrorKind::InvalidPointer => {
                    Err(wrong(ErrorKind::InvalidArgument, "unregister"))
                }
                gone => gone,
            });
        },
    ),
    Saboteur::new(
        "device-addresses-off",
        "host.device-address",
        "Gives the address of the next byte to devices.",
        |h| {
            h.host.device_address(|host, ptr, device| Ok(host.device_address(ptr, device)?.offset(1)));
        },
    ),
    Saboteur::new(
        "device-addresses-in-a-window",
        "host.device-address",
        "Shows page-locked memory to the second device at another address.",
        |h| {
            h.host.device_address(|host, ptr, device| {
                let address = host.device_address(ptr, device)?;
                Ok(if device > 0 { address.offset(1 << 40) } else { address })
            });
        },
    ),
];

/// Gives memory of a kind so many bytes after the beginning of its block.
fn shift(h: &mut Hooks, by: usize, kind: HostMemoryKind) {
    let moved = Note::<HashSet<HostPtr>>::default();
    let given = moved.clone();
    h.host.allocate(move |host, bytes, options| {
        if bytes == 0 || options.kind != kind {
            return host.allocate(bytes, options);
        }
        let ptr = host.allocate(bytes.saturating_add(by), options)?.offset(by);
        given.with(|given| given.insert(ptr));
        Ok(ptr)
    });
    h.host.free(move |host, ptr| {
        let off = moved.with(|moved| moved.remove(&ptr));
        let start = NonNull::new(ptr.as_ptr().wrapping_sub(if off { by } else { 0 }));
        host.free(start.map_or(ptr, HostPtr::new))
    });
}
