//! Mapped memory.

use std::collections::{BTreeMap, HashMap, HashSet};

use highwater_hal::{
    DevicePtr, ErrorKind, FillPattern, Location, MemoryCopy, MemoryFill, PhysicalMemoryId, PhysicalMemoryOptions,
};

use super::super::hooks::Hooks;
use super::super::reference::{forgiven, is, renamed, wrong};
use super::super::state::Shared;
use super::memory::exceeds_the_rest;

mutants! {
    in "mapped.reserve":
    "one-range-for-two": "Reserves one range for all requests of the same size." => |h| {
        let shared = Shared::<HashMap<(u32, usize), (DevicePtr, u64)>>::default();
        let (given, freed) = (shared.clone(), shared.clone());
        h.backend.reserve_addresses(move |reference, device, bytes| {
            let again = given.with(|given| {
                given.get_mut(&(device, bytes)).map(|(ptr, users)| {
                    *users += 1;
                    *ptr
                })
            });
            if let Some(ptr) = again {
                return Ok(ptr);
            }
            let ptr = reference.reserve_addresses(device, bytes)?;
            given.with(|given| given.insert((device, bytes), (ptr, 1)));
            Ok(ptr)
        });
        h.backend.free_addresses(move |reference, device, ptr, bytes| {
            let last = freed.with(|freed| match freed.get_mut(&(device, bytes)) {
                Some((_, users)) if *users > 1 => {
                    *users -= 1;
                    false
                }
                _ => true,
            });
            if !last {
                return Ok(());
            }
            freed.with(|freed| freed.remove(&(device, bytes)));
            reference.free_addresses(device, ptr, bytes)
        });
        h.count(move |live| {
            live.reservations += shared.with(|shared| shared.values().map(|(_, users)| users - 1).sum::<u64>())
        });
    };
    "reserved-addresses-off": "Reserves addresses that are no multiple of the granularity." => |h| {
        let moved = Shared::<HashSet<DevicePtr>>::default();
        let given = moved.clone();
        h.backend.reserve_addresses(move |reference, device, bytes| {
            let piece = reference.capabilities(device)?.mapped_memory_granularity;
            if bytes == 0 || !bytes.is_multiple_of(piece) {
                return reference.reserve_addresses(device, bytes);
            }
            let ptr = reference.reserve_addresses(device, bytes + piece)?.offset(piece / 2);
            given.with(|given| given.insert(ptr));
            Ok(ptr)
        });
        h.backend.free_addresses(move |reference, device, ptr, bytes| {
            let piece = reference.capabilities(device)?.mapped_memory_granularity;
            if moved.with(|moved| moved.remove(&ptr)) {
                return reference.free_addresses(device, DevicePtr::new(ptr.get() - piece as u64 / 2), bytes + piece);
            }
            reference.free_addresses(device, ptr, bytes)
        });
    };

    in "mapped.sizes":
    "odd-ranges-reserved": "Reserves any number of bytes." => |h| h.backend.reserve_addresses(|reference, device, bytes| {
        let piece = reference.capabilities(device)?.mapped_memory_granularity;
        reference.reserve_addresses(device, bytes.max(1).next_multiple_of(piece))
    });
    "odd-memory-created": "Creates any number of bytes of physical memory." =>
        |h| h.backend.create_memory(|reference, device, options| {
            let piece = reference.capabilities(device)?.mapped_memory_granularity;
            reference.create_memory(device, &with_bytes(options, options.bytes.max(1).next_multiple_of(piece)))
        });

    in "mapped.free-checked":
    "mapped-addresses-freed": "Accepts ranges of addresses that it cannot free." =>
        |h| h.backend.free_addresses(|reference, device, ptr, bytes| {
            forgiven(ErrorKind::InvalidPointer, reference.free_addresses(device, ptr, bytes), ())
        });

    "memory-without-an-id-freed": "Frees addresses at which memory is mapped if the id of the memory is destroyed." => |h| {
        let mapped = Shared::<HashMap<DevicePtr, PhysicalMemoryId>>::default();
        let (made, gone, destroyed) = (mapped.clone(), mapped.clone(), destroyed_memory(h));
        h.backend.map_memory(move |reference, device, ptr, memory| {
            reference.map_memory(device, ptr, memory)?;
            made.with(|mapped| mapped.insert(ptr, memory));
            Ok(())
        });
        h.backend.unmap_memory(move |reference, device, ptr, bytes| {
            reference.unmap_memory(device, ptr, bytes)?;
            let range = ptr.get()..ptr.get() + bytes as u64;
            gone.with(|mapped| mapped.retain(|at, _| !range.contains(&at.get())));
            Ok(())
        });
        h.backend.free_addresses(move |reference, device, ptr, bytes| {
            let freed = reference.free_addresses(device, ptr, bytes);
            let range = ptr.get()..ptr.get().saturating_add(bytes as u64);
            let inside: Vec<PhysicalMemoryId> = mapped.with(|mapped| {
                mapped.iter().filter(|(at, _)| range.contains(&at.get())).map(|(_, memory)| *memory).collect()
            });
            let is_wrong = !inside.is_empty() && destroyed.with(|gone| inside.iter().all(|memory| gone.contains(memory)));
            if is_wrong { forgiven(ErrorKind::InvalidPointer, freed, ()) } else { freed }
        });
    };

    in "mapped.exhausted":
    "physical-memory-exhausted-as-invalid": "Reports too much physical memory as an invalid argument." =>
        |h| h.backend.create_memory(|reference, device, options| {
            let created = reference.create_memory(device, options);
            renamed(ErrorKind::OutOfMemory, ErrorKind::InvalidArgument, "create_memory", created)
        });
    "less-physical-memory": "Creates less physical memory than requested when memory is exhausted." =>
        |h| h.backend.create_memory(|reference, device, options| match reference.create_memory(device, options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                let piece = reference.capabilities(device)?.mapped_memory_granularity;
                reference.create_memory(device, &with_bytes(options, piece))
            }
            created => created,
        });
    "refused-physical-parts-kept": "Keeps a part when it refuses physical memory that exceeds the rest of the device, but not the device." => |h| {
        let kept = Shared::new(0_u64);
        let taken = kept.clone();
        h.backend.create_memory(move |reference, device, options| {
            let created = reference.create_memory(device, options);
            if exceeds_the_rest(reference, device, options.bytes, &created)? {
                let piece = reference.capabilities(device)?.mapped_memory_granularity;
                let part = reference.create_memory(device, &PhysicalMemoryOptions::new(piece));
                taken.set(taken.get() + u64::from(part.is_ok()));
            }
            created
        });
        h.count(move |live| live.physical_memory -= kept.get());
    };
    "refused-physical-memory-counted": "Counts physical memory that it could not create." => |h| {
        let refused = Shared::new(0_u64);
        let seen = refused.clone();
        h.backend.create_memory(move |reference, device, options| {
            let created = reference.create_memory(device, options);
            seen.set(seen.get() + u64::from(is(&created, ErrorKind::OutOfMemory)));
            created
        });
        h.count(move |live| live.physical_memory += refused.get());
    };

    in "mapped.shared":
    "shareable-memory-kept-private" [by_two_processes]: "Creates shareable physical memory for this process alone." =>
        |h| h.backend.create_memory(|reference, device, options| {
            let mut private = *options;
            private.shareable = None;
            reference.create_memory(device, &private)
        });

    in "mapped.transports":
    "any-transport-accepted": "Creates memory for one process if it cannot share it as requested." =>
        |h| h.backend.create_memory(|reference, device, options| match reference.create_memory(device, options) {
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                let mut private = *options;
                private.shareable = None;
                reference.create_memory(device, &private)
            }
            created => created,
        });

    in "mapped.destroy":
    "destroyed-memory-unmapped": "Unmaps physical memory that is destroyed." => |h| {
        let mappings = mappings(h);
        h.backend.destroy_memory(move |reference, memory| {
            reference.destroy_memory(memory)?;
            let found = mappings.with(|pieces| {
                let of_it = pieces.iter().filter(|(_, piece)| piece.memory == memory);
                of_it.map(|(start, piece)| (*start, piece.bytes)).collect::<Vec<_>>()
            });
            // Outstanding work must not lose its memory.
            reference.settle();
            for (start, bytes) in found {
                reference.unmap_memory(memory.device(), DevicePtr::new(start), bytes)?;
            }
            Ok(())
        });
    };

    "no-access-for-others-after-destruction" needs [TWO_DEVICES, has::peer_copy]:
        "Refuses another device access to mapped memory that was destroyed before." => |h| {
        let (mappings, gone) = (mappings(h), destroyed_memory(h));
        h.backend.set_memory_access(move |reference, device, ptr, bytes, accessing| {
            let range = ptr.get()..ptr.get() + bytes as u64;
            let ids: Vec<PhysicalMemoryId> =
                mappings.with(|pieces| pieces.range(range).map(|(_, piece)| piece.memory).collect());
            match accessing != device && gone.with(|gone| ids.iter().any(|memory| gone.contains(memory))) {
                true => Err(wrong(ErrorKind::InvalidHandle, "set_memory_access")),
                false => reference.set_memory_access(device, ptr, bytes, accessing),
            }
        });
    };
    "no-access-after-destruction": "Refuses access to mapped memory that was destroyed before." => |h| {
        let (mappings, gone) = (mappings(h), destroyed_memory(h));
        h.backend.set_memory_access(move |reference, device, ptr, bytes, accessing| {
            let memory = mappings.with(|pieces| pieces.get(&ptr.get()).map(|piece| piece.memory));
            if memory.is_some_and(|memory| gone.with(|gone| gone.contains(&memory))) {
                return Err(wrong(ErrorKind::InvalidPointer, "set_memory_access"));
            }
            reference.set_memory_access(device, ptr, bytes, accessing)
        });
    };

    in "mapped.returns":
    "destroyed-memory-kept": "Keeps physical memory that is destroyed." => |h| {
        let kept = Shared::new(0_u64);
        let gone = Shared::<HashSet<PhysicalMemoryId>>::default();
        let destroyed = kept.clone();
        h.backend.destroy_memory(move |reference, memory| {
            if !gone.with(|gone| gone.insert(memory)) {
                return Err(wrong(ErrorKind::InvalidHandle, "destroy_memory"));
            }
            reference.capabilities(memory.device())?;
            destroyed.set(destroyed.get() + 1);
            Ok(())
        });
        h.count(move |live| live.physical_memory -= kept.get());
    };

    in "mapped.contiguous":
    "copies-end-at-borders": "Copies up to the border of a piece of mapped memory." => |h| {
        let mappings = mappings(h);
        h.backend.copy(move |reference, copy, stream| {
            let side = |location| match location {
                Location::Device { ptr, .. } => up_to_border(&mappings, ptr, copy.bytes),
                Location::Host(_) => copy.bytes,
            };
            let bytes = side(copy.dst).min(side(copy.src));
            reference.copy(&MemoryCopy::new(copy.dst, copy.src, bytes), stream)
        });
    };
    "fills-end-at-borders": "Fills up to the border of a piece of mapped memory." => |h| {
        let mappings = mappings(h);
        h.backend.fill(move |reference, fill, stream| {
            let bytes = up_to_border(&mappings, fill.dst, fill.count * fill.pattern.bytes());
            let count = bytes / fill.pattern.bytes();
            reference.fill(&MemoryFill::new(fill.device, fill.dst, fill.pattern, count), stream)
        });
    };
    "products-across-borders-refused": "Refuses products whose result crosses a border of mapped memory." => |h| {
        let mappings = mappings(h);
        h.handle.gemm(move |reference, gemm| {
            let bytes = gemm.shape.extents("gemm")?.c * gemm.shape.output.bytes();
            if up_to_border(&mappings, gemm.c, bytes) < bytes {
                return Err(wrong(ErrorKind::InvalidPointer, "gemm"));
            }
            reference.gemm(gemm)
        });
    };

    "fills-of-sixteen-pieces": "Fills the first 16 pieces of mapped memory, and no more." => |h| {
        let mappings = mappings(h);
        h.backend.fill(move |reference, fill, stream| {
            let (all, mut bytes) = (fill.count * fill.pattern.bytes(), 0);
            for _ in 0..16 {
                bytes += up_to_border(&mappings, fill.dst.offset(bytes), all - bytes);
            }
            let count = bytes / fill.pattern.bytes();
            reference.fill(&MemoryFill::new(fill.device, fill.dst, fill.pattern, count), stream)
        });
    };

    in "mapped.move":
    "unmapped-memory-cleared": "Clears memory that is unmapped." =>
        |h| h.backend.unmap_memory(|reference, device, ptr, bytes| {
            let fill = MemoryFill::new(device, ptr, FillPattern::U8(0), bytes);
            // Memory to which no device has access is not cleared, and a wrong range is refused below.
            let _ = reference.on_own_stream(device, |stream| reference.fill(&fill, stream));
            reference.unmap_memory(device, ptr, bytes)
        });

    in "mapped.map-checked":
    "refused-memory-taken-for-mapped" needs [has::foreign_memory]: "Refuses the next right mapping of memory after a refused one." => |h| {
        let refused = Shared::<HashSet<PhysicalMemoryId>>::default();
        h.backend.map_memory(move |reference, device, ptr, memory| {
            let mapped = reference.map_memory(device, ptr, memory);
            if mapped.is_err() {
                refused.with(|refused| refused.insert(memory));
                return mapped;
            }
            if !refused.with(|refused| refused.remove(&memory)) {
                return Ok(());
            }
            let bytes = reference.describe_memory(device, ptr)?.bytes;
            reference.unmap_memory(device, ptr, bytes)?;
            Err(wrong(ErrorKind::InvalidPointer, "map_memory"))
        });
    };
    "addresses-in-use-accepted": "Accepts addresses that are in use or not reserved, and maps nothing." =>
        |h| h.backend.map_memory(|reference, device, ptr, memory| {
            forgiven(ErrorKind::InvalidPointer, reference.map_memory(device, ptr, memory), ())
        });
    "odd-addresses-accepted": "Maps memory at the next lower multiple of the granularity." =>
        |h| h.backend.map_memory(|reference, device, ptr, memory| {
            let piece = reference.capabilities(device)?.mapped_memory_granularity as u64;
            reference.map_memory(device, DevicePtr::new(ptr.get() / piece * piece), memory)
        });
    "odd-addresses-are-pointers": "Reports an address that is no multiple of the granularity as not reserved." =>
        |h| h.backend.map_memory(|reference, device, ptr, memory| {
            let mapped = reference.map_memory(device, ptr, memory);
            renamed(ErrorKind::InvalidArgument, ErrorKind::InvalidPointer, "map_memory", mapped)
        });
    "memory-of-other-devices-accepted" needs [TWO_DEVICES]: "Accepts memory of another device, and maps nothing." =>
        |h| h.backend.map_memory(|reference, device, ptr, memory| {
            forgiven(ErrorKind::WrongDevice, reference.map_memory(device, ptr, memory), ())
        });

    in "mapped.peer":
    "peers-without-access": "Gives no access to another device." =>
        |h| h.backend.set_memory_access(|reference, device, ptr, bytes, accessing| {
            reference.set_memory_access(device, ptr, bytes, if accessing < reference.device_count() { device } else { accessing })
        });

    in "mapped.whole":
    "access-to-parts": "Accepts ranges that are no whole mappings, and gives no access." =>
        |h| h.backend.set_memory_access(|reference, device, ptr, bytes, accessing| {
            forgiven(ErrorKind::InvalidPointer, reference.set_memory_access(device, ptr, bytes, accessing), ())
        });
    "parts-unmapped": "Accepts ranges that are no whole mappings, and unmaps nothing." =>
        |h| h.backend.unmap_memory(|reference, device, ptr, bytes| {
            forgiven(ErrorKind::InvalidPointer, reference.unmap_memory(device, ptr, bytes), ())
        });
    "one-mapping-at-a-time": "Refuses to unmap several mappings at once." => |h| {
        let mappings = mappings(h);
        let looked = mappings.clone();
        h.backend.unmap_memory(move |reference, device, ptr, bytes| {
            if looked.with(|pieces| pieces.get(&ptr.get()).is_some_and(|piece| piece.bytes < bytes)) {
                return Err(wrong(ErrorKind::InvalidPointer, "unmap_memory"));
            }
            reference.unmap_memory(device, ptr, bytes)
        });
    };
}

/// A piece of mapped memory.
struct Piece {
    bytes: usize,
    memory: PhysicalMemoryId,
}

/// Returns the pieces of mapped memory, by address. Pieces that are unmapped stay until others are mapped there.
fn mappings(hooks: &mut Hooks) -> Shared<BTreeMap<u64, Piece>> {
    let pieces = Shared::<BTreeMap<u64, Piece>>::default();
    let sizes = Shared::<HashMap<PhysicalMemoryId, usize>>::default();
    let (mapped, created) = (pieces.clone(), sizes.clone());
    hooks.backend.create_memory(move |reference, device, options| {
        let memory = reference.create_memory(device, options)?;
        created.with(|sizes| sizes.insert(memory, options.bytes));
        Ok(memory)
    });
    hooks.backend.map_memory(move |reference, device, ptr, memory| {
        reference.map_memory(device, ptr, memory)?;
        let bytes = sizes.with(|sizes| sizes.get(&memory).copied().unwrap_or_default());
        mapped.with(|pieces| {
            let (start, end) = (ptr.get(), ptr.offset(bytes).get());
            pieces.retain(|at, piece| *at >= end || at + piece.bytes as u64 <= start);
            pieces.insert(start, Piece { bytes, memory })
        });
        Ok(())
    });
    pieces
}

/// Returns how many of the bytes at an address lie in its piece of mapped memory; all if it is other memory.
fn up_to_border(mappings: &Shared<BTreeMap<u64, Piece>>, ptr: DevicePtr, bytes: usize) -> usize {
    mappings.with(|pieces| {
        let around = pieces.range(..=ptr.get()).next_back();
        let end = around.map(|(start, piece)| start + piece.bytes as u64).filter(|end| *end > ptr.get());
        end.map_or(bytes, |end| bytes.min((end - ptr.get()) as usize))
    })
}

fn with_bytes(options: &PhysicalMemoryOptions, bytes: usize) -> PhysicalMemoryOptions {
    let mut options = *options;
    options.bytes = bytes;
    options
}

/// The physical memory whose id was destroyed.
fn destroyed_memory(h: &mut Hooks) -> Shared<HashSet<PhysicalMemoryId>> {
    let gone = Shared::<HashSet<PhysicalMemoryId>>::default();
    let noted = gone.clone();
    h.backend.destroy_memory(move |reference, memory| {
        reference.destroy_memory(memory)?;
        noted.with(|gone| gone.insert(memory));
        Ok(())
    });
    gone
}
