//! Device memory.

use std::collections::{HashMap, HashSet};

use highwater_hal::{AllocateOptions, DeviceMemoryKind, DevicePtr, ErrorKind, StreamId};

use super::super::Saboteur;
use super::super::honest::{is, wrong};
use super::super::note::Note;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("addresses-off", "memory.aligned", "Gives addresses that are no multiple of 256.", |h| {
        const OFF: usize = 128;
        let moved = Note::<HashSet<(u32, DevicePtr)>>::default();
        let given = moved.clone();
        h.backend.allocate(move |honest, device, options| {
            if options.kind != DeviceMemoryKind::Plain || options.bytes == 0 {
                return honest.allocate(device, options);
            }
            let ptr = honest.allocate(device, &AllocateOptions::new(options.bytes.saturating_add(OFF)))?.offset(OFF);
            given.with(|given| given.insert((device, ptr)));
            Ok(ptr)
        });
        h.backend.free(move |honest, device, ptr, stream| {
            let off = moved.with(|moved| moved.remove(&(device, ptr)));
            honest.free(device, if off { DevicePtr::new(ptr.get() - OFF as u64) } else { ptr }, stream)
        });
    }),
    Saboteur::new("one-block-for-two", "memory.disjoint", "Gives one block to all who ask for so many bytes.", |h| {
        let shared = Note::<HashMap<(u32, usize), (DevicePtr, u64)>>::default();
        let (given, freed) = (shared.clone(), shared.clone());
        h.backend.allocate(move |honest, device, options| {
            if options.kind != DeviceMemoryKind::Plain {
                return honest.allocate(device, options);
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
            let ptr = honest.allocate(device, options)?;
            given.with(|given| given.insert(key, (ptr, 1)));
            Ok(ptr)
        });
        h.backend.free(move |honest, device, ptr, stream| {
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
            if last { honest.free(device, ptr, stream) } else { Ok(()) }
        });
        h.count(move |live| {
            live.allocations += shared.with(|shared| shared.values().map(|(_, users)| users - 1).sum::<u64>())
        });
    }),
    Saboteur::new("stream-ordered-freed-early", "memory.disjoint", "Frees stream-ordered memory at once.", |h| {
        h.backend.free(|honest, device, ptr, stream| match stream {
            None => honest.free(device, ptr, None),
            Some(stream) => {
                // Freed on a stream that has nothing to do, so that it is free now. The suite alone uses the memory.
                honest.query_stream(stream)?;
                honest.aside(device, |aside| honest.free(device, ptr, Some(aside)))
            }
        });
    }),
    Saboteur::new("nothing-allocated", "memory.zero", "Allocates 0 bytes.", |h| {
        h.backend.allocate(|honest, device, options| {
            honest.allocate(device, &AllocateOptions::new(options.bytes.max(1)).with_kind(options.kind))
        });
    }),
    Saboteur::new(
        "exhausted-as-invalid",
        "memory.exhausted",
        "Calls more bytes than there are an invalid argument.",
        |h| {
            h.backend.allocate(|honest, device, options| match honest.allocate(device, options) {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                    Err(wrong(ErrorKind::InvalidArgument, "allocate"))
                }
                allocated => allocated,
            });
        },
    ),
    Saboteur::new("less-than-asked-for", "memory.exhausted", "Gives what there is where more is asked for.", |h| {
        h.backend.allocate(|honest, device, options| match honest.allocate(device, options) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                honest.allocate(device, &AllocateOptions::new(1 << 20).with_kind(options.kind))
            }
            allocated => allocated,
        });
    }),
    Saboteur::new("refused-blocks-counted", "memory.exhausted", "Counts blocks that it could not give.", |h| {
        let refused = Note::new(0_u64);
        let seen = refused.clone();
        h.backend.allocate(move |honest, device, options| {
            let allocated = honest.allocate(device, options);
            seen.set(seen.get() + u64::from(is(&allocated, ErrorKind::OutOfMemory)));
            allocated
        });
        h.count(move |live| live.allocations += refused.get());
    }),
    Saboteur::new(
        "in-the-order-of-another",
        "memory.stream-ordered",
        "Returns memory that another stream has not freed yet.",
        |h| {
            // Freed blocks of each device and size, with the stream that frees them.
            let freed = Note::<HashMap<(u32, DevicePtr), (usize, StreamId)>>::default();
            let blocks = Note::<HashMap<(u32, DevicePtr), usize>>::default();
            let (given, given_out) = (freed.clone(), blocks.clone());
            h.backend.allocate(move |honest, device, options| {
                let DeviceMemoryKind::StreamOrdered(stream) = options.kind else {
                    return honest.allocate(device, options);
                };
                honest.query_stream(stream)?;
                let other = given.with(|freed| {
                    let fits = |(key, (bytes, of)): (&(u32, DevicePtr), &(usize, StreamId))| {
                        (key.0 == device && *bytes == options.bytes && *of != stream).then_some(*key)
                    };
                    let key = freed.iter().find_map(fits)?;
                    freed.remove(&key).map(|_| key.1)
                });
                let ptr = other.map_or_else(|| honest.allocate(device, options), Ok)?;
                given_out.with(|blocks| blocks.insert((device, ptr), options.bytes));
                Ok(ptr)
            });
            let kept = freed.clone();
            h.backend.free(move |honest, device, ptr, stream| {
                let Some(stream) = stream else { return honest.free(device, ptr, None) };
                match blocks.with(|blocks| blocks.remove(&(device, ptr))) {
                    Some(bytes) if honest.is_busy(stream) => {
                        kept.with(|freed| freed.insert((device, ptr), (bytes, stream)));
                        Ok(())
                    }
                    _ => honest.free(device, ptr, Some(stream)),
                }
            });
            h.count(move |live| live.allocations -= freed.with(|freed| freed.len() as u64));
        },
    ),
    Saboteur::new("blocks-kept", "memory.free-returns", "Keeps plain memory that is freed.", |h| {
        let kept = Note::new(0_u64);
        let freed = kept.clone();
        h.backend.free(move |honest, device, ptr, stream| {
            if stream.is_some() {
                return honest.free(device, ptr, stream);
            }
            freed.set(freed.get() + 1);
            Ok(())
        });
        h.count(move |live| live.allocations -= kept.get());
    }),
    Saboteur::new(
        "stream-ordered-blocks-kept",
        "memory.free-returns",
        "Keeps stream-ordered memory that is freed.",
        |h| {
            let kept = Note::new(0_u64);
            let freed = kept.clone();
            h.backend.free(move |honest, device, ptr, stream| {
                let Some(stream) = stream else { return honest.free(device, ptr, None) };
                honest.query_stream(stream)?;
                freed.set(freed.get() + 1);
                Ok(())
            });
            h.count(move |live| live.allocations -= kept.get());
        },
    ),
    Saboteur::new(
        "stream-ordered-frees-wait",
        "memory.free-returns",
        "Waits for the stream that memory is freed on.",
        |h| {
            h.backend.free(|honest, device, ptr, stream| {
                stream.map_or(Ok(()), |stream| honest.wait_for(stream))?;
                honest.free(device, ptr, stream)
            });
        },
    ),
];
