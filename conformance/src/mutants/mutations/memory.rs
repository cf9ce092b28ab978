//! Device memory.

use std::collections::{HashMap, HashSet};
use std::thread::ThreadId;

use highwater_hal::{
    AllocateOptions, DeviceMemoryKind, DevicePtr, ErrorKind, EventId, MemoryInfo, PhysicalMemoryId, StreamId,
};

use super::super::hooks::Hooks;
use super::super::reference::{Reference, is, renamed};
use super::super::state::{Deferred, Shared};
use super::living_streams;

mutants! {
    in "memory.aligned":
    "addresses-off": "Gives addresses that are no multiple of 256." => |h| {
        const OFF: usize = 128;
        let moved = Shared::<HashSet<(u32, DevicePtr)>>::default();
        let given = moved.clone();
        h.backend.allocate(move |reference, device, options| {
            if options.kind != DeviceMemoryKind::Plain || options.bytes == 0 {
                return reference.allocate(device, options);
            }
            let ptr = reference.allocate(device, &AllocateOptions::new(options.bytes.saturating_add(OFF)))?.offset(OFF);
            given.with(|given| given.insert((device, ptr)));
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            let off = moved.with(|moved| moved.remove(&(device, ptr)));
            reference.free(device, if off { DevicePtr::new(ptr.get() - OFF as u64) } else { ptr }, stream)
        });
    };

    in "memory.disjoint":
    "one-block-for-two": "Returns one block for all requests of the same size." => |h| {
        let shared = Shared::<HashMap<(u32, usize), (DevicePtr, u64)>>::default();
        let (given, freed) = (shared.clone(), shared.clone());
        h.backend.allocate(move |reference, device, options| {
            if options.kind != DeviceMemoryKind::Plain {
                return reference.allocate(device, options);
            }
            let key = (device, options.bytes);
            let again = given.with(|given| {
                given.get_mut(&key).map(|(ptr, users)| {
                    *users += 1;
                    *ptr
                })
            });
            if let Some(ptr) = again {
                return Ok(ptr);
            }
            let ptr = reference.allocate(device, options)?;
            given.with(|given| given.insert(key, (ptr, 1)));
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            let last = freed.with(|freed| {
                let Some((&key, (_, users))) =
                    freed.iter_mut().find(|((on, _), (other, _))| *on == device && *other == ptr)
                else {
                    return true;
                };
                *users -= 1;
                let last = *users == 0;
                if last {
                    freed.remove(&key);
                }
                last
            });
            if last { reference.free(device, ptr, stream) } else { Ok(()) }
        });
        h.count(move |live| {
            live.allocations += shared.with(|shared| shared.values().map(|(_, users)| users - 1).sum::<u64>())
        });
    };
    "stream-ordered-freed-early" needs [has::stream_ordered_memory]: "Frees stream-ordered memory at once." =>
        |h| h.backend.free(|reference, device, ptr, stream| match stream {
            None => reference.free(device, ptr, None),
            Some(stream) => {
                // Freed on a stream that has nothing to do, so that it is free now. The suite alone uses the memory.
                reference.query_stream(stream)?;
                reference.on_own_stream(device, |own| reference.free(device, ptr, Some(own)))
            }
        });

    in "memory.zero":
    "nothing-allocated": "Allocates 0 bytes." => |h| h.backend.allocate(|reference, device, options| {
        reference.allocate(device, &AllocateOptions::new(options.bytes.max(1)).with_kind(options.kind))
    });

    in "memory.exhausted":
    "exhausted-as-invalid": "Reports too many bytes as an invalid argument." =>
        |h| h.backend.allocate(|reference, device, options| {
            renamed(ErrorKind::OutOfMemory, ErrorKind::InvalidArgument, "allocate", reference.allocate(device, options))
        });
    "less-than-asked-for": "Returns a smaller block when memory is exhausted." =>
        |h| h.backend.allocate(|reference, device, options| match reference.allocate(device, options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                reference.allocate(device, &AllocateOptions::new(1 << 20).with_kind(options.kind))
            }
            allocated => allocated,
        });
    "live-blocks-not-counted": "Returns a smaller block for a request that exceeds the rest of the device, but not the device." =>
        |h| h.backend.allocate(|reference, device, options| {
            let allocated = reference.allocate(device, options);
            match exceeds_the_rest(reference, device, options.bytes, &allocated)? {
                true => reference.allocate(device, &AllocateOptions::new(256).with_kind(options.kind)),
                false => allocated,
            }
        });
    "refused-parts-kept": "Keeps a part when it refuses a request that exceeds the rest of the device, but not the device." => |h| {
        let kept = Shared::new(0_u64);
        let taken = kept.clone();
        h.backend.allocate(move |reference, device, options| {
            let allocated = reference.allocate(device, options);
            if exceeds_the_rest(reference, device, options.bytes, &allocated)? {
                let part = reference.allocate(device, &AllocateOptions::new(1 << 20));
                taken.set(taken.get() + u64::from(part.is_ok()));
            }
            allocated
        });
        h.count(move |live| live.allocations -= kept.get());
    };
    "refused-blocks-counted": "Counts blocks that it could not give." => |h| {
        let refused = Shared::new(0_u64);
        let seen = refused.clone();
        h.backend.allocate(move |reference, device, options| {
            let allocated = reference.allocate(device, options);
            seen.set(seen.get() + u64::from(is(&allocated, ErrorKind::OutOfMemory)));
            allocated
        });
        h.count(move |live| live.allocations += refused.get());
    };

    in "memory.info-counts":
    "free-memory-of-the-start": "Reports the free memory of the first call for good." => |h| {
        let first = Shared::<HashMap<u32, MemoryInfo>>::default();
        h.backend.memory_info(move |reference, device| {
            let info = reference.memory_info(device)?;
            Ok(first.with(|first| *first.entry(device).or_insert(info)))
        });
    };
    "free-memory-of-any-device": "Reports the free memory of the device that was queried last until the next allocation." => |h| {
        let last = Shared::<Option<MemoryInfo>>::default();
        let (allocated, freed) = (last.clone(), last.clone());
        h.backend.allocate(move |reference, device, options| {
            allocated.set(None);
            reference.allocate(device, options)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            freed.set(None);
            reference.free(device, ptr, stream)
        });
        h.backend.memory_info(move |reference, device| {
            let info = reference.memory_info(device)?;
            Ok(last.with(|last| *last.get_or_insert(info)))
        });
    };
    "shareable-bytes-free" needs [has::shareable_memory]: "Counts shareable memory as free." => |h| {
        let shareable = Shared::<HashMap<(u32, DevicePtr), u64>>::default();
        let (given, freed) = (shareable.clone(), shareable.clone());
        h.backend.allocate(move |reference, device, options| {
            let ptr = reference.allocate(device, options)?;
            if let DeviceMemoryKind::Shareable(_) = options.kind {
                given.with(|given| given.insert((device, ptr), options.bytes as u64));
            }
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            freed.with(|freed| freed.remove(&(device, ptr)));
            reference.free(device, ptr, stream)
        });
        h.backend.memory_info(move |reference, device| {
            let mut info = reference.memory_info(device)?;
            let bytes: u64 = shareable.with(|all| all.iter().filter(|((on, _), _)| *on == device).map(|all| all.1).sum());
            info.free = info.total.min(info.free + bytes);
            Ok(info)
        });
    };
    "reserved-bytes-free" needs [has::mapped_memory]: "Counts the bytes of reserved addresses as free." => |h| {
        let reserved = Shared::<HashMap<(u32, DevicePtr), u64>>::default();
        let (given, freed) = (reserved.clone(), reserved.clone());
        h.backend.reserve_addresses(move |reference, device, bytes| {
            let ptr = reference.reserve_addresses(device, bytes)?;
            given.with(|given| given.insert((device, ptr), bytes as u64));
            Ok(ptr)
        });
        h.backend.free_addresses(move |reference, device, ptr, bytes| {
            reference.free_addresses(device, ptr, bytes)?;
            freed.with(|freed| freed.remove(&(device, ptr)));
            Ok(())
        });
        h.backend.memory_info(move |reference, device| {
            let mut info = reference.memory_info(device)?;
            let bytes: u64 = reserved.with(|all| all.iter().filter(|((on, _), _)| *on == device).map(|all| all.1).sum());
            info.free = info.total.min(info.free + bytes);
            Ok(info)
        });
    };

    in "memory.info-returns":
    "blocks-of-other-threads-freed-late": "Counts a large block that another thread than its allocator frees until the next allocation." => |h| {
        let live = Shared::<HashMap<DevicePtr, (ThreadId, u64)>>::default();
        let late = Shared::<HashMap<u32, u64>>::default();
        let (made, freed, counted) = (live.clone(), late.clone(), late.clone());
        h.backend.allocate(move |reference, device, options| {
            freed.with(|freed| freed.remove(&device));
            let ptr = reference.allocate(device, options)?;
            if options.bytes >= 64 << 20 {
                made.with(|made| made.insert(ptr, (std::thread::current().id(), options.bytes as u64)));
            }
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            reference.free(device, ptr, stream)?;
            let known = live.with(|live| live.remove(&ptr));
            if let Some((_, bytes)) = known.filter(|(thread, _)| *thread != std::thread::current().id()) {
                late.with(|late| *late.entry(device).or_default() += bytes);
            }
            Ok(())
        });
        h.backend.memory_info(move |reference, device| {
            let mut info = reference.memory_info(device)?;
            info.free = info.free.saturating_sub(counted.with(|counted| counted.get(&device).copied().unwrap_or(0)));
            Ok(info)
        });
    };
    "free-memory-never-grows": "Reports the least free memory that it ever had." => |h| {
        let least = Shared::<HashMap<u32, u64>>::default();
        h.backend.memory_info(move |reference, device| {
            let mut info = reference.memory_info(device)?;
            info.free = least.with(|least| {
                let known = least.entry(device).or_insert(info.free);
                *known = info.free.min(*known);
                *known
            });
            Ok(info)
        });
    };
    "physical-memory-freed-late" needs [has::mapped_memory]: "Frees large physical memory at the next creation of some on its device." => |h| {
        let live = Shared::<HashMap<PhysicalMemoryId, u64>>::default();
        let late = Shared::<HashMap<u32, u64>>::default();
        let (made, freed, counted) = (live.clone(), late.clone(), late.clone());
        h.backend.create_memory(move |reference, device, options| {
            freed.with(|freed| freed.remove(&device));
            let memory = reference.create_memory(device, options)?;
            if options.bytes >= 1 << 20 {
                made.with(|made| made.insert(memory, options.bytes as u64));
            }
            Ok(memory)
        });
        h.backend.destroy_memory(move |reference, memory| {
            reference.destroy_memory(memory)?;
            if let Some(bytes) = live.with(|live| live.remove(&memory)) {
                late.with(|late| *late.entry(memory.device()).or_default() += bytes);
            }
            Ok(())
        });
        h.backend.memory_info(move |reference, device| {
            let mut info = reference.memory_info(device)?;
            info.free = info.free.saturating_sub(counted.with(|late| late.get(&device).copied().unwrap_or_default()));
            Ok(info)
        });
    };
    "large-blocks-freed-late": "Frees a large block at the next allocation of its device." => |h| {
        let kept = Shared::<HashMap<u32, Vec<DevicePtr>>>::default();
        let large = Shared::<HashSet<(u32, DevicePtr)>>::default();
        let (late, given, counted) = (kept.clone(), large.clone(), kept.clone());
        h.backend.allocate(move |reference, device, options| {
            let freed = late.with(|late| late.remove(&device)).unwrap_or_default();
            freed.into_iter().try_for_each(|ptr| reference.free(device, ptr, None))?;
            let ptr = reference.allocate(device, options)?;
            if options.bytes >= 1 << 20 {
                given.with(|given| given.insert((device, ptr)));
            }
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            if stream.is_none() && large.with(|large| large.remove(&(device, ptr))) {
                kept.with(|kept| kept.entry(device).or_default().push(ptr));
                return Ok(());
            }
            reference.free(device, ptr, stream)
        });
        h.count(move |live| {
            live.allocations -= counted.with(|kept| kept.values().map(|blocks| blocks.len() as u64).sum::<u64>());
        });
    };

    "large-blocks-freed-late-while-busy": "Reports a large block as in use after its free, if a stream of the device is busy." => |h| {
        let streams = living_streams(h);
        let large = Shared::<HashMap<(u32, DevicePtr), u64>>::default();
        let late = Shared::<HashMap<u32, u64>>::default();
        let (given, over, counted) = (large.clone(), late.clone(), late.clone());
        h.backend.allocate(move |reference, device, options| {
            over.with(|late| late.remove(&device));
            let ptr = reference.allocate(device, options)?;
            if options.bytes >= 64 << 20 {
                given.with(|large| large.insert((device, ptr), options.bytes as u64));
            }
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            let living = streams.with(|streams| streams.clone());
            let is_busy = living.into_iter().any(|stream| stream.device() == device && reference.is_pending(stream));
            reference.free(device, ptr, stream)?;
            if let Some(bytes) = large.with(|large| large.remove(&(device, ptr))).filter(|_| is_busy) {
                late.with(|late| *late.entry(device).or_default() += bytes);
            }
            Ok(())
        });
        h.backend.memory_info(move |reference, device| {
            let mut info = reference.memory_info(device)?;
            info.free = info.free.saturating_sub(counted.with(|late| late.get(&device).copied().unwrap_or_default()));
            Ok(info)
        });
    };

    in "memory.stream-ordered":
    "in-the-order-of-another": "Returns memory that another stream has not freed yet." => |h| in_the_order_of_another(h, 0);
    "long-blocks-in-the-order-of-another" needs [has::stream_ordered_memory]:
        "Returns memory of 1 MiB or more that another stream has not freed yet." => |h| in_the_order_of_another(h, 1 << 20);
    "in-the-order-of-an-earlier-event" needs [has::stream_ordered_memory]:
        "Returns memory that a stream has not freed yet to streams that have waited for any event of it." => |h| {
        let events = Shared::<HashMap<EventId, StreamId>>::default();
        let waits = Shared::<HashSet<(StreamId, StreamId)>>::default();
        let (recorded, waited) = (events.clone(), waits.clone());
        h.backend.record_event(move |reference, event, stream| {
            reference.record_event(event, stream)?;
            recorded.with(|events| events.insert(event, stream));
            Ok(())
        });
        h.backend.stream_wait_event(move |reference, stream, event| {
            reference.stream_wait_event(stream, event)?;
            if let Some(of) = events.with(|events| events.get(&event).copied()) {
                waited.with(|waits| waits.insert((stream, of)));
            }
            Ok(())
        });
        in_the_order_of(h, 0, move |stream, of| waits.with(|waits| waits.contains(&(stream, of))));
    };

    in "memory.free-returns":
    "blocks-kept": "Keeps plain memory that is freed." => |h| {
        let kept = Shared::new(0_u64);
        let freed = kept.clone();
        h.backend.free(move |reference, device, ptr, stream| {
            if stream.is_some() {
                return reference.free(device, ptr, stream);
            }
            freed.set(freed.get() + 1);
            Ok(())
        });
        h.count(move |live| live.allocations -= kept.get());
    };
    "exported-blocks-kept" needs [has::shareable_memory]: "Keeps memory that is freed after it was exported." => |h| {
        let (kept, exported) = (Shared::new(0_u64), Shared::<HashSet<(u32, DevicePtr)>>::default());
        let (freed, shared) = (kept.clone(), exported.clone());
        h.sharing.export_memory(move |sharing, device, ptr, transport| {
            let handle = sharing.export_memory(device, ptr, transport)?;
            shared.with(|exported| exported.insert((device, ptr)));
            Ok(handle)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            if stream.is_some() || !exported.with(|exported| exported.remove(&(device, ptr))) {
                return reference.free(device, ptr, stream);
            }
            freed.set(freed.get() + 1);
            Ok(())
        });
        h.count(move |live| live.allocations -= kept.get());
    };
    "stream-ordered-blocks-kept" needs [has::stream_ordered_memory]: "Keeps stream-ordered memory that is freed." => |h| {
        let kept = Shared::new(0_u64);
        let freed = kept.clone();
        h.backend.free(move |reference, device, ptr, stream| {
            let Some(stream) = stream else { return reference.free(device, ptr, None) };
            reference.query_stream(stream)?;
            freed.set(freed.get() + 1);
            Ok(())
        });
        h.count(move |live| live.allocations -= kept.get());
    };
    "frees-end-with-their-stream" needs [has::stream_ordered_memory]: "Loses a stream-ordered free if the next call destroys the busy stream." => |h| {
        let (held, lost) = (Deferred::default(), Shared::new(0_u64));
        let (freed, gone, counted) = (held.clone(), held.clone(), lost.clone());
        h.backend.free(move |reference, device, ptr, stream| match stream {
            Some(on) if reference.is_pending(on) => {
                freed.defer(on, move |reference: &Reference| reference.free(device, ptr, stream));
                Ok(())
            }
            _ => reference.free(device, ptr, stream),
        });
        h.backend.destroy_stream(move |reference, stream| {
            if gone.has(stream) {
                gone.forget(stream);
                lost.set(lost.get() + 1);
            }
            reference.destroy_stream(stream)
        });
        h.before(move |reference, method, _| if method == "destroy_stream" { Ok(()) } else { held.release(reference, None) });
        h.count(move |live| live.allocations -= counted.get());
    };
    "stream-ordered-blocks-kept-elsewhere" needs [has::stream_ordered_memory]: "Keeps stream-ordered memory that another stream frees." => |h| {
        let (kept, owners) = (Shared::new(0_u64), Shared::<HashMap<(u32, DevicePtr), StreamId>>::default());
        let (freed, given) = (kept.clone(), owners.clone());
        h.backend.allocate(move |reference, device, options| {
            let ptr = reference.allocate(device, options)?;
            if let DeviceMemoryKind::StreamOrdered(stream) = options.kind {
                given.with(|owners| owners.insert((device, ptr), stream));
            }
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            match (stream, owners.with(|owners| owners.remove(&(device, ptr)))) {
                (Some(stream), Some(owner)) if stream != owner => {
                    reference.query_stream(stream)?;
                    freed.set(freed.get() + 1);
                    Ok(())
                }
                _ => reference.free(device, ptr, stream),
            }
        });
        h.count(move |live| live.allocations -= kept.get());
    };
    "stream-ordered-freed-by-the-owner" needs [has::stream_ordered_memory]: "Frees stream-ordered memory in the order of the stream that allocated it." => |h| {
        let owners = Shared::<HashMap<(u32, DevicePtr), StreamId>>::default();
        let given = owners.clone();
        h.backend.allocate(move |reference, device, options| {
            let ptr = reference.allocate(device, options)?;
            if let DeviceMemoryKind::StreamOrdered(stream) = options.kind {
                given.with(|owners| owners.insert((device, ptr), stream));
            }
            Ok(ptr)
        });
        h.backend.free(move |reference, device, ptr, stream| {
            let owner = owners.with(|owners| owners.remove(&(device, ptr)));
            // The owner may be gone.
            let owner = owner.filter(|owner| reference.query_stream(*owner).is_ok());
            reference.free(device, ptr, stream.map(|stream| owner.unwrap_or(stream)))
        });
    };
    "stream-ordered-frees-wait" needs [has::stream_ordered_memory]: "Waits for the stream that memory is freed on." =>
        |h| h.backend.free(|reference, device, ptr, stream| {
            stream.map_or(Ok(()), |stream| reference.wait_for(stream))?;
            reference.free(device, ptr, stream)
        });
}

/// Returns whether a request was refused that exceeds the rest of a device, but not the device.
pub(super) fn exceeds_the_rest<T>(
    reference: &Reference,
    device: u32,
    bytes: usize,
    answer: &highwater_hal::Result<T>,
) -> highwater_hal::Result<bool> {
    Ok(is(answer, ErrorKind::OutOfMemory) && bytes as u64 <= reference.memory_info(device)?.total)
}

/// Returns memory of at least `least` bytes that another stream has not freed yet.
fn in_the_order_of_another(h: &mut Hooks, least: usize) {
    in_the_order_of(h, least, |_, _| true);
}

/// Returns memory of at least `least` bytes to a stream that another one has not freed yet, if `gives` says so of the two.
fn in_the_order_of(h: &mut Hooks, least: usize, gives: impl Fn(StreamId, StreamId) -> bool + Send + Sync + 'static) {
    // Freed blocks of each device and size, with the stream that frees them.
    let freed = Shared::<HashMap<(u32, DevicePtr), (usize, StreamId)>>::default();
    let blocks = Shared::<HashMap<(u32, DevicePtr), usize>>::default();
    let (given, given_out) = (freed.clone(), blocks.clone());
    h.backend.allocate(move |reference, device, options| {
        let DeviceMemoryKind::StreamOrdered(stream) = options.kind else {
            return reference.allocate(device, options);
        };
        // The call itself refuses a bad argument.
        if !reference.is_recording(stream) && reference.query_stream(stream).is_err() {
            return reference.allocate(device, options);
        }
        let other = given.with(|freed| {
            let fits = |(key, (bytes, of)): (&(u32, DevicePtr), &(usize, StreamId))| {
                (key.0 == device && *bytes == options.bytes && *of != stream && gives(stream, *of)).then_some(*key)
            };
            let key = freed.iter().find_map(fits)?;
            freed.remove(&key).map(|_| key.1)
        });
        let ptr = other.map_or_else(|| reference.allocate(device, options), Ok)?;
        given_out.with(|blocks| blocks.insert((device, ptr), options.bytes));
        Ok(ptr)
    });
    let kept = freed.clone();
    h.backend.free(move |reference, device, ptr, stream| {
        let Some(stream) = stream else { return reference.free(device, ptr, None) };
        match blocks.with(|blocks| blocks.remove(&(device, ptr))) {
            Some(bytes) if bytes >= least && reference.is_pending(stream) => {
                kept.with(|freed| freed.insert((device, ptr), (bytes, stream)));
                Ok(())
            }
            _ => reference.free(device, ptr, Some(stream)),
        }
    });
    h.count(move |live| live.allocations -= freed.with(|freed| freed.len() as u64));
}
