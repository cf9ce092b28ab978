//! Memory and events that two processes share. The second process has the same mutant.

use std::collections::{HashMap, HashSet};

use highwater_hal::{
    AllocateOptions, Completion, DeviceMemoryKind, DevicePtr, ErrorKind, EventHandle, EventId, FillPattern, Location,
    MemoryCopy, MemoryFill, MemoryHandle, Result, Transport,
};

use super::super::hooks::Hooks;
use super::super::reference::{ReferenceSharing, forgiven, is, renamed, wrong};
use super::super::state::Shared;

mutants! {
    in "ipc.shared-bytes":
    "shared-by-copying" [by_two_processes]: "Opens a copy of another process's memory." => |h| {
        let copies = Shared::<HashSet<DevicePtr>>::default();
        let made = copies.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let opened = sharing.open_memory(device, handle)?;
            let copy = own(sharing, device, handle)?;
            let at = |ptr| Location::Device { device, ptr };
            let reference = &sharing.backend;
            let bytes = MemoryCopy::new(at(copy), at(opened), handle.bytes as usize);
            reference.on_own_stream(device, |own| reference.copy(&bytes, own))?;
            sharing.close_memory(device, opened)?;
            made.with(|made| made.insert(copy));
            Ok(copy)
        });
        close_own(h, copies);
    };
    "handles-of-whole-pages" [by_two_processes]: "Rounds the bytes of a handle up to pages." =>
        |h| h.sharing.export_memory(|sharing, device, ptr, transport| {
            let mut handle = sharing.export_memory(device, ptr, transport)?;
            handle.bytes = handle.bytes.next_multiple_of(4096);
            Ok(handle)
        });
    "first-export-for-all" [by_two_processes]: "Exports the block of the first export every time." => |h| {
        let first = Shared::<Option<MemoryHandle>>::default();
        let kept = first.clone();
        h.count(move |live| live.descriptors -= kept.with(|kept| u64::from(kept.is_some())));
        h.sharing.export_memory(move |sharing, device, ptr, transport| {
            let handle = sharing.export_memory(device, ptr, transport)?;
            Ok(first.with(|first| match first {
                Some(first) if first.bytes >= handle.bytes => first.clone(),
                _ => first.insert(handle).clone(),
            }))
        });
    };

    "thirty-two-open-at-once" [by_two_processes]: "Gives the address of another block once 32 blocks are open." => |h| {
        let open = Shared::<HashMap<DevicePtr, u32>>::default();
        let closed = open.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            let other = open.with(|open| {
                *open.entry(ptr).or_insert(0) += 1;
                if open.len() <= 32 {
                    return None;
                }
                open.remove(&ptr);
                open.keys().next().copied()
            });
            let Some(other) = other else { return Ok(ptr) };
            sharing.close_memory(device, ptr)?;
            Ok(other)
        });
        h.sharing.close_memory(move |sharing, device, ptr| {
            sharing.close_memory(device, ptr)?;
            closed.with(|open| {
                let opens = open.get_mut(&ptr).map(|opens| {
                    *opens -= 1;
                    *opens
                });
                if opens == Some(0) {
                    open.remove(&ptr);
                }
            });
            Ok(())
        });
    };

    "memory-ends-with-its-importer" [by_two_processes]: "Refuses copies of exported memory once a process that opened it has ended." => |h| {
        let known = exported_memory(h);
        let had_children = Shared::<bool>::default();
        h.backend.copy(move |reference, copy, stream| {
            let had = had_children.with(|had| std::mem::replace(had, *had || has_children()));
            let is_exported = |location| match location {
                Location::Device { ptr, .. } => known.with(|known| {
                    known.iter().any(|(start, bytes)| (start.get()..start.get() + bytes).contains(&ptr.get()))
                }),
                _ => false,
            };
            if had && (is_exported(copy.src) || is_exported(copy.dst)) && !has_children() {
                return Err(wrong(ErrorKind::PeerLost, "copy"));
            }
            reference.copy(copy, stream)
        });
    };

    in "ipc.export-shareable":
    "plain-memory-exported" [by_two_processes]: "Gives a handle of nothing for memory that is not shareable." =>
        |h| h.sharing.export_memory(|sharing, device, ptr, transport| {
            let exported = sharing.export_memory(device, ptr, transport);
            if !is(&exported, ErrorKind::InvalidArgument) {
                return exported;
            }
            Ok(MemoryHandle::new(transport, sharing.backend.device_info(device)?.uuid, 4096, [0; 64]))
        });

    in "ipc.export-transport":
    "other-transports-invalid" [by_two_processes]: "Reports an absent transport as an invalid argument." =>
        |h| h.sharing.export_memory(|sharing, device, ptr, transport| {
            let exported = sharing.export_memory(device, ptr, transport);
            renamed(ErrorKind::Unsupported, ErrorKind::InvalidArgument, "export_memory", exported)
        });

    in "ipc.open-again":
    "opens-in-eight-bits" [by_two_processes]: "Counts opens of one block modulo 256." => |h| {
        let opens = Shared::<HashMap<DevicePtr, u32>>::default();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            let count = opens.with(|opens| {
                let count = opens.entry(ptr).or_default();
                *count += 1;
                *count
            });
            if count == 257 {
                (0..256).try_for_each(|_| sharing.close_memory(device, ptr))?;
            }
            Ok(ptr)
        });
    };
    "opened-again-elsewhere" [by_two_processes]: "Gives another address when memory is opened again." => |h| {
        let (opened, others) = (Shared::<HashSet<DevicePtr>>::default(), Shared::<HashSet<DevicePtr>>::default());
        let made = others.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            if opened.with(|opened| opened.insert(ptr)) {
                return Ok(ptr);
            }
            sharing.close_memory(device, ptr)?;
            let other = own(sharing, device, handle)?;
            made.with(|made| made.insert(other));
            Ok(other)
        });
        close_own(h, others);
    };
    "one-close-for-all" [by_two_processes]: "Counts how often memory was opened as once." => |h| {
        let opened = Shared::<HashSet<DevicePtr>>::default();
        let closed = opened.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            if !opened.with(|opened| opened.insert(ptr)) {
                sharing.close_memory(device, ptr)?;
            }
            Ok(ptr)
        });
        h.sharing.close_memory(move |sharing, device, ptr| {
            closed.with(|closed| closed.remove(&ptr));
            sharing.close_memory(device, ptr)
        });
    };

    in "ipc.descriptor-keeps":
    "descriptors-end-with-their-exporter" [by_two_processes]: "Refuses handles whose exporter has ended." => |h| {
        let had_children = Shared::<bool>::default();
        h.sharing.open_memory(move |sharing, device, handle| {
            let had = had_children.with(|had| std::mem::replace(had, *had || has_children()));
            match had && !has_children() {
                true => Err(wrong(ErrorKind::InvalidArgument, "open_memory")),
                false => sharing.open_memory(device, handle),
            }
        });
    };

    in "ipc.free-keeps":
    "freed-memory-used-again" [by_two_processes]: "Returns exported memory that was freed for the next request of its size." => |h| {
        let known = exported_memory(h);
        let freed = Shared::<HashMap<(u32, u64), DevicePtr>>::default();
        let (given, parked) = (freed.clone(), freed.clone());
        h.backend.free(move |reference, device, ptr, stream| {
            let Some(bytes) = known.with(|known| known.remove(&ptr)) else {
                return reference.free(device, ptr, stream);
            };
            let earlier = freed.with(|freed| freed.insert((device, bytes), ptr));
            earlier.map_or(Ok(()), |earlier| reference.free(device, earlier, None))
        });
        h.backend.allocate(move |reference, device, options| {
            let key = (device, options.bytes as u64);
            let again = match options.kind {
                DeviceMemoryKind::Shareable(_) => given.with(|given| given.remove(&key)),
                _ => None,
            };
            again.map_or_else(|| reference.allocate(device, options), Ok)
        });
        h.count(move |live| live.allocations -= parked.with(|parked| parked.len() as u64));
    };
    "freed-memory-cleared" [by_two_processes]: "Fills exported memory with zeros before it frees it." => |h| {
        let known = exported_memory(h);
        h.backend.free(move |reference, device, ptr, stream| {
            if let Some(bytes) = known.with(|known| known.remove(&ptr)) {
                let zeros = MemoryFill::new(device, ptr, FillPattern::U8(0), bytes as usize);
                reference.on_own_stream(device, |own| reference.fill(&zeros, own))?;
            }
            reference.free(device, ptr, stream)
        });
    };

    "exported-memory-cleared-at-its-unmapping" [by_two_processes] needs [has::mapped_memory]: "Fills exported mapped memory with zeros before it unmaps it." => |h| {
        let known = exported_memory(h);
        h.backend.unmap_memory(move |reference, device, ptr, bytes| {
            if known.with(|known| known.remove(&ptr)).is_some() {
                let zeros = MemoryFill::new(device, ptr, FillPattern::U8(0), bytes);
                reference.on_own_stream(device, |own| reference.fill(&zeros, own))?;
            }
            reference.unmap_memory(device, ptr, bytes)
        });
    };

    in "ipc.open-outlives":
    "mappings-end-with-their-exporter" [by_two_processes]: "Refuses copies from memory whose exporter has ended." => |h| {
        let opened = Shared::<HashMap<DevicePtr, u64>>::default();
        let known = opened.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            if has_children() {
                opened.with(|opened| opened.insert(ptr, handle.bytes));
            }
            Ok(ptr)
        });
        h.backend.copy(move |reference, copy, stream| {
            if let Location::Device { ptr, .. } = copy.src
                && known.with(|known| {
                    known.iter().any(|(start, bytes)| (start.get()..start.get() + bytes).contains(&ptr.get()))
                })
                && !has_children()
            {
                return Err(wrong(ErrorKind::PeerLost, "copy"));
            }
            reference.copy(copy, stream)
        });
    };

    in "ipc.open-checked":
    "handles-of-any-device" [by_two_processes]: "Opens handles that name another device, or none." =>
        |h| h.sharing.open_memory(|sharing, device, handle| {
            let mut handle = handle.clone();
            handle.device_uuid = sharing.backend.device_info(device)?.uuid;
            sharing.open_memory(device, &handle)
        });
    "handles-opened-for-the-device-they-name" [by_two_processes] needs [TWO_DEVICES]: "Opens a handle for the device that it names, not for the one that was asked for." =>
        |h| h.sharing.open_memory(|sharing, device, handle| {
            sharing.open_memory(sharing.device_of(handle).unwrap_or(device), handle)
        });
    "handles-of-nothing-opened" [by_two_processes]: "Opens handles that no exporter made, as its own memory." => |h| {
        let made = Shared::<HashSet<DevicePtr>>::default();
        let opened = made.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let result = sharing.open_memory(device, handle);
            if !is(&result, ErrorKind::InvalidArgument) {
                return result;
            }
            let ptr = sharing.backend.allocate(device, &AllocateOptions::new(4096))?;
            made.with(|made| made.insert(ptr));
            Ok(ptr)
        });
        close_own(h, opened);
    };
    "open-memory-known-by-its-payload" [by_two_processes]: "Opens a handle without its descriptor while its memory is open." => |h| {
        // The payload of each open mapping, and how often it is open.
        let opened = Shared::<HashMap<DevicePtr, ([u8; 64], u32)>>::default();
        let extra = Shared::<Vec<DevicePtr>>::default();
        let (known, closed, given, taken) = (opened.clone(), opened.clone(), extra.clone(), extra);
        h.sharing.open_memory(move |sharing, device, handle| {
            let bare = handle.transport == Transport::Descriptor && handle.descriptor.is_none();
            let found = known.with(|known| {
                known.iter().find(|(_, (payload, _))| *payload == handle.payload).map(|(ptr, _)| *ptr)
            });
            if let Some(ptr) = found.filter(|_| bare) {
                given.with(|extra| extra.push(ptr));
                return Ok(ptr);
            }
            let ptr = sharing.open_memory(device, handle)?;
            known.with(|known| known.entry(ptr).or_insert((handle.payload, 0)).1 += 1);
            Ok(ptr)
        });
        h.sharing.close_memory(move |sharing, device, ptr| {
            let is_extra = taken.with(|extra| {
                let place = extra.iter().position(|other| *other == ptr);
                place.map(|place| extra.swap_remove(place)).is_some()
            });
            if is_extra {
                return Ok(());
            }
            sharing.close_memory(device, ptr)?;
            closed.with(|known| {
                let is_last = known.get_mut(&ptr).is_some_and(|(_, opens)| {
                    *opens -= 1;
                    *opens == 0
                });
                if is_last {
                    known.remove(&ptr);
                }
            });
            Ok(())
        });
    };
    "no-descriptor-as-unsupported" [by_two_processes]: "Reports a handle without its descriptor as unsupported." =>
        |h| h.sharing.open_memory(|sharing, device, handle| match sharing.open_memory(device, handle) {
            Err(error) if handle.descriptor.is_none() && error.kind() == ErrorKind::InvalidArgument => {
                Err(wrong(ErrorKind::Unsupported, "open_memory"))
            }
            opened => opened,
        });

    in "ipc.close-unknown":
    "anything-closed" [by_two_processes]: "Closes addresses that are not open." =>
        |h| h.sharing.close_memory(|sharing, device, ptr| {
            forgiven(ErrorKind::InvalidPointer, sharing.close_memory(device, ptr), ())
        });
    "any-address-closes" [by_two_processes]: "Closes memory by any address inside it." => |h| {
        let opened = Shared::<HashMap<DevicePtr, u64>>::default();
        let known = opened.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            opened.with(|opened| opened.insert(ptr, handle.bytes));
            Ok(ptr)
        });
        h.sharing.close_memory(move |sharing, device, ptr| {
            let around = known.with(|known| {
                known
                    .iter()
                    .find(|(start, bytes)| (start.get()..start.get() + *bytes).contains(&ptr.get()))
                    .map(|(start, _)| *start)
            });
            sharing.close_memory(device, around.unwrap_or(ptr))
        });
    };

    in "ipc.export-event":
    "plain-events-exported" [by_two_processes]: "Gives a handle of nothing for events of this process." =>
        |h| h.sharing.export_event(|sharing, event| {
            let exported = sharing.export_event(event);
            if !is(&exported, ErrorKind::InvalidArgument) {
                return exported;
            }
            Ok(EventHandle::new(sharing.backend.device_info(event.device())?.uuid, [0; 64]))
        });

    in "ipc.event-orders":
    "opened-events-order-nothing" [by_two_processes]: "Accepts waits for events of other processes and forgets them." => |h| {
        let opened = opened_events(h);
        h.backend.stream_wait_event(move |reference, stream, event| {
            if !opened.with(|opened| opened.contains(&event)) {
                return reference.stream_wait_event(stream, event);
            }
            reference.query_stream(stream)?;
            reference.query_event(event).map(drop)
        });
    };
    "opened-events-complete" [by_two_processes]: "Reports events of other processes as reached." => |h| {
        let opened = opened_events(h);
        h.backend.query_event(move |reference, event| {
            let completion = reference.query_event(event)?;
            Ok(if opened.with(|opened| opened.contains(&event)) { Completion::Complete } else { completion })
        });
    };
    "opened-events-end-after-32-waits" [by_two_processes]: "Ignores waits for an event of another process after the 32nd wait." => |h| {
        let opened = opened_events(h);
        let waits = Shared::<HashMap<EventId, u32>>::default();
        h.backend.stream_wait_event(move |reference, stream, event| {
            let is_opened = opened.with(|opened| opened.contains(&event));
            let count = waits.with(|waits| *waits.entry(event).and_modify(|count| *count += 1).or_insert(1));
            match is_opened && count > 32 {
                true => {
                    reference.query_stream(stream)?;
                    reference.query_event(event).map(drop)
                }
                false => reference.stream_wait_event(stream, event),
            }
        });
    };
    "records-stay-at-home" [by_two_processes]: "Forgets the records of events that another process made." => |h| {
        let opened = opened_events(h);
        h.backend.record_event(move |reference, event, stream| {
            if !opened.with(|opened| opened.contains(&event)) {
                return reference.record_event(event, stream);
            }
            reference.query_event(event)?;
            reference.query_stream(stream).map(drop)
        });
    };

    in "ipc.event-peer-ends":
    "events-of-ended-processes-fail" [by_two_processes]: "Refuses to wait for an event when its process has ended." => |h| {
        let opened = opened_events(h);
        h.backend.synchronize_event(move |reference, event| {
            reference.synchronize_event(event)?;
            match opened.with(|opened| opened.contains(&event)) && !has_children() {
                true => Err(wrong(ErrorKind::PeerLost, "synchronize_event")),
                false => Ok(()),
            }
        });
    };
}

/// Memory of this process, as large as the handle says.
fn own(sharing: &ReferenceSharing, device: u32, handle: &MemoryHandle) -> Result<DevicePtr> {
    sharing.backend.allocate(device, &AllocateOptions::new(handle.bytes as usize))
}

/// Closes what was opened as memory of this process.
fn close_own(h: &mut Hooks, own: Shared<HashSet<DevicePtr>>) {
    h.sharing.close_memory(move |sharing, device, ptr| match own.with(|own| own.remove(&ptr)) {
        true => sharing.backend.free(device, ptr, None),
        false => sharing.close_memory(device, ptr),
    });
}

/// Bytes of the memory of this process that was exported, by address.
fn exported_memory(h: &mut Hooks) -> Shared<HashMap<DevicePtr, u64>> {
    let exported = Shared::<HashMap<DevicePtr, u64>>::default();
    let known = exported.clone();
    h.sharing.export_memory(move |sharing, device, ptr, transport| {
        let handle = sharing.export_memory(device, ptr, transport)?;
        exported.with(|exported| exported.insert(ptr, handle.bytes));
        Ok(handle)
    });
    known
}

/// Events of other processes that were opened here.
fn opened_events(h: &mut Hooks) -> Shared<HashSet<EventId>> {
    let opened = Shared::<HashSet<EventId>>::default();
    let noted = opened.clone();
    h.sharing.open_event(move |sharing, device, handle| {
        let event = sharing.open_event(device, handle)?;
        noted.with(|noted| noted.insert(event));
        Ok(event)
    });
    opened
}

/// Whether this process has children that it has not waited for. The second process of a case is one; it has none itself.
fn has_children() -> bool {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return true };
    let children = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    // If the system does not report children, assume that none has ended.
    tasks.flatten().any(|task| children(task).map_or(true, |children| !children.trim().is_empty()))
}
