//! The description of memory, and mapped memory that is imported. The second process has the same mutant.

use std::collections::HashSet;

use highwater_hal::numbers::Coded;
use highwater_hal::{DevicePtr, ErrorKind, MemoryRange, PhysicalMemoryOptions, RangeKind, Transport, Transports};

use super::super::reference::{forgiven, is, renamed};
use super::super::state::Shared;

mutants! {
    in "foreign.range":
    "ranges-begin-at-the-address": "Describes what follows an address, not what contains it." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            range.bytes -= (ptr.get() - range.base.get()) as usize;
            range.base = ptr;
            Ok(range)
        });
    "neighbors-described-as-one": "Describes mappings without a gap as one range." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            let next = DevicePtr::new(range.base.get() + range.bytes as u64);
            if range.kind == RangeKind::Mapped
                && let Ok(next) = reference.describe_memory(device, next)
                && next.kind == RangeKind::Mapped
            {
                range.bytes += next.bytes;
            }
            Ok(range)
        });
    "ranges-of-whole-pages": "Rounds the bytes of a range up to 2 MiB." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            range.bytes = range.bytes.next_multiple_of(2 << 20);
            Ok(range)
        });

    in "foreign.kind":
    "everything-described-as-plain": "Describes all memory as plain." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            range.kind = RangeKind::Plain;
            Ok(range)
        });
    "plain-described-as-mapped": "Describes plain memory as mapped." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            if range.kind == RangeKind::Plain {
                range.kind = RangeKind::Mapped;
            }
            Ok(range)
        });

    in "foreign.transports":
    "no-transports-described": "Lists no transport." => |h| h.backend.describe_memory(|reference, device, ptr| {
        let mut range = reference.describe_memory(device, ptr)?;
        range.transports = Transports::NONE;
        Ok(range)
    });
    "every-transport-described": "Lists every transport of the device." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            let offered = reference.capabilities(device)?.ipc_transports;
            let all = Transport::ALL.iter().copied().filter(|&transport| offered.contains(transport));
            range.transports = all.fold(Transports::NONE, Transports::with);
            Ok(range)
        });

    "transports-lost-by-a-refusal": "Lists no transport once an export of the memory was refused." => |h| {
        let refused = Shared::<HashSet<DevicePtr>>::default();
        let (exported, freed) = (refused.clone(), refused.clone());
        h.sharing.export_memory(move |sharing, device, ptr, transport| {
            let handle = sharing.export_memory(device, ptr, transport);
            if handle.is_err() {
                exported.with(|refused| refused.insert(ptr));
            }
            handle
        });
        h.backend.free(move |reference, device, ptr, stream| {
            freed.with(|refused| refused.remove(&ptr));
            reference.free(device, ptr, stream)
        });
        h.backend.describe_memory(move |reference, device, ptr| {
            let mut range = reference.describe_memory(device, ptr)?;
            if refused.with(|refused| refused.contains(&range.base)) {
                range.transports = Transports::NONE;
            }
            Ok(range)
        });
    };

    in "foreign.unknown":
    "descriptions-kept" needs [has::mapped_memory]: "Keeps the descriptions of mapped memory until its addresses are freed." => |h| {
        let known = Shared::<Vec<(u32, MemoryRange)>>::default();
        let freed = known.clone();
        h.backend.describe_memory(move |reference, device, ptr| {
            let found = known.with(|known| known.iter().find(|(of, range)| *of == device && range.contains(ptr)).copied());
            if let Some((_, range)) = found {
                return Ok(range);
            }
            let range = reference.describe_memory(device, ptr)?;
            if range.kind == RangeKind::Mapped {
                known.with(|known| known.push((device, range)));
            }
            Ok(range)
        });
        h.backend.free_addresses(move |reference, device, ptr, bytes| {
            reference.free_addresses(device, ptr, bytes)?;
            let addresses = MemoryRange::new(RangeKind::Mapped, ptr, bytes);
            freed.with(|known| known.retain(|(_, range)| !addresses.contains(range.base)));
            Ok(())
        });
    };
    "nothing-described": "Describes addresses of nothing as one byte of plain memory." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let nothing = MemoryRange::new(RangeKind::Plain, ptr, 1);
            forgiven(ErrorKind::InvalidPointer, reference.describe_memory(device, ptr), nothing)
        });
    "other-devices-unknown" needs [TWO_DEVICES]: "Reports memory of another device as an unknown address." =>
        |h| h.backend.describe_memory(|reference, device, ptr| {
            let described = reference.describe_memory(device, ptr);
            renamed(ErrorKind::WrongDevice, ErrorKind::InvalidPointer, "describe_memory", described)
        });

    in "ipc.import-maps":
    "imported-as-new-memory" [by_two_processes]: "Creates memory of its own instead of importing it." =>
        |h| h.sharing.import_memory(|sharing, device, handle| {
            let imported = sharing.import_memory(device, handle)?;
            sharing.backend.destroy_memory(imported)?;
            sharing.backend.create_memory(device, &PhysicalMemoryOptions::new(handle.bytes as usize))
        });

    in "ipc.import-checked":
    "imports-of-nothing" [by_two_processes]: "Imports handles that no exporter made, as new memory." =>
        |h| h.sharing.import_memory(|sharing, device, handle| {
            let imported = sharing.import_memory(device, handle);
            if !is(&imported, ErrorKind::InvalidArgument) {
                return imported;
            }
            let piece = sharing.backend.capabilities(device)?.mapped_memory_granularity;
            sharing.backend.create_memory(device, &PhysicalMemoryOptions::new(piece))
        });
    "imports-for-the-device-they-name" [by_two_processes] needs [TWO_DEVICES]: "Imports a handle for the device that it names, not for the one that was asked for." =>
        |h| h.sharing.import_memory(|sharing, device, handle| {
            sharing.import_memory(sharing.device_of(handle).unwrap_or(device), handle)
        });
    "imports-of-blocks" [by_two_processes]: "Imports memory of `allocate`, as new memory, in the process that exports it." => |h| {
        let exported = Shared::<HashSet<[u8; 64]>>::default();
        let kept = exported.clone();
        h.sharing.export_memory(move |sharing, device, ptr, transport| {
            let handle = sharing.export_memory(device, ptr, transport)?;
            kept.with(|kept| kept.insert(handle.payload));
            Ok(handle)
        });
        h.sharing.import_memory(move |sharing, device, handle| {
            let imported = sharing.import_memory(device, handle);
            let is_own = exported.with(|exported| exported.contains(&handle.payload));
            if !is_own || !is(&imported, ErrorKind::InvalidArgument) {
                return imported;
            }
            let piece = sharing.backend.capabilities(device)?.mapped_memory_granularity;
            sharing.backend.create_memory(device, &PhysicalMemoryOptions::new(piece))
        });
    };
    "imports-of-any-device" [by_two_processes]: "Imports handles that name another device, or none." =>
        |h| h.sharing.import_memory(|sharing, device, handle| {
            let mut handle = handle.clone();
            handle.device_uuid = sharing.backend.device_info(device)?.uuid;
            sharing.import_memory(device, &handle)
        });
}
