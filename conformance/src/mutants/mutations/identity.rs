//! The identity of the backend, and the description of its devices.

use std::collections::HashMap;

use highwater_hal::{
    BackendTag, DevicePtr, Error, ErrorKind, EventId, GraphId, IdParts, ObjectId, StreamId, Transports,
};

use super::super::hooks::Hooks;
use super::super::reference::{forgiven, renamed, wrong};
use super::super::state::Shared;
use crate::cases::forge;

mutants! {
    in "identity.stable":
    "identity-changes": "Has one version more while a stream is alive." => |h| h.identity = Some(|identity| {
        let mut other = identity.clone();
        other.versions.push(("mutant".to_owned(), "2".to_owned()));
        other
    });
    "device-count-changes": "Counts one device less every second time." => |h| {
        let asked = Shared::new(0_u32);
        h.device_count(move |reference| {
            asked.set(asked.get() ^ 1);
            reference.device_count() - asked.get()
        });
    };

    in "host.one-allocator":
    "allocators-differ": "Returns another allocator of page-locked memory in each call." => |h| h.renews_allocators = true;

    in "backend.errors":
    "errors-without-a-message": "Leaves out the message of errors about exhausted memory." =>
        |h| h.backend.allocate(|reference, device, options| {
            reference.allocate(device, options).map_err(|error| match error.kind() {
                kind @ ErrorKind::OutOfMemory => Error::new(kind, "allocate", ""),
                _ => error,
            })
        });
    "errors-of-another-call": "Names `create_event` in the errors of `create_stream`." =>
        |h| h.backend.create_stream(|reference, device, options| {
            reference.create_stream(device, options).map_err(|error| wrong(error.kind(), "create_event"))
        });

    in "identity.tagged":
    "events-with-another-tag": "Issues ids of events with another tag." => |h| {
        let tags = Tags::new();
        let made = tags.clone();
        h.backend.create_event(move |reference, device, options| {
            Ok(made.disguise(reference.create_event(device, options)?))
        });
        h.event_in(move |event: EventId| tags.reveal(event));
    };
    "streams-on-the-first-device" needs [TWO_DEVICES]: "Issues ids of streams that name device 0." => |h| {
        let true_ids = Shared::<HashMap<StreamId, StreamId>>::default();
        let issued = true_ids.clone();
        h.backend.create_stream(move |reference, device, options| {
            let stream = reference.create_stream(device, options)?;
            let id = forge::<StreamId>(IdParts { device: 0, ..stream.parts() });
            issued.with(|ids| ids.insert(id, stream));
            Ok(id)
        });
        h.stream_in(move |stream| true_ids.with(|ids| ids.get(&stream).copied().unwrap_or(stream)));
    };
    "graphs-with-another-tag" needs [has::capture]: "Issues ids of graphs with another tag." => |h| {
        let tags = Tags::new();
        let (made, used) = (tags.clone(), tags.clone());
        h.backend.end_capture(move |reference, stream| Ok(made.disguise(reference.end_capture(stream)?)));
        h.backend.instantiate_graph(move |reference, graph| reference.instantiate_graph(used.reveal(graph)));
        h.backend.destroy_graph(move |reference, graph: GraphId| reference.destroy_graph(tags.reveal(graph)));
    };

    in "devices.some":
    "no-device": "Opens with no device." => |h| h.device_count(|_| 0);
    "ordinal-from-one": "Counts the devices from 1 in their descriptions." => |h| h.backend.device_info(|reference, device| {
        let mut info = reference.device_info(device)?;
        info.ordinal += 1;
        Ok(info)
    });

    in "devices.uuid":
    "one-uuid-for-all" needs [TWO_DEVICES]: "Gives every device the UUID of the first." => |h| h.backend.device_info(|reference, device| {
        let mut info = reference.device_info(device)?;
        info.uuid = reference.device_info(0)?.uuid;
        Ok(info)
    });
    "uuid-counts": "Gives a device another UUID each time." => |h| {
        let asked = Shared::new(0_u8);
        h.backend.device_info(move |reference, device| {
            asked.with(|asked| *asked = asked.wrapping_add(1));
            let mut info = reference.device_info(device)?;
            info.uuid[15] ^= asked.get();
            Ok(info)
        });
    };
    "uuid-of-the-process" [by_two_processes]: "Gives a device another UUID in each process." =>
        |h| h.backend.device_info(|reference, device| {
            let mut info = reference.device_info(device)?;
            let process = std::process::id().to_le_bytes();
            info.uuid.iter_mut().zip(process).for_each(|(byte, of)| *byte ^= of);
            Ok(info)
        });

    in "devices.capabilities-stable":
    "capabilities-change": "Wants a workspace of another size while a stream is alive." =>
        |h| h.backend.capabilities(|reference, device| {
            let mut capabilities = reference.capabilities(device)?;
            capabilities.blas_workspace_bytes += usize::from(reference.live_objects().streams > 0) * 4096;
            Ok(capabilities)
        });

    in "memory.info":
    "more-free-than-total": "Has more bytes free than there are." => |h| h.backend.memory_info(|reference, device| {
        let mut info = reference.memory_info(device)?;
        info.free = info.total + 1;
        Ok(info)
    });
    "total-in-kilobytes": "Gives the total memory in units of 1000 bytes." => |h| h.backend.memory_info(|reference, device| {
        let mut info = reference.memory_info(device)?;
        info.total /= 1000;
        info.free /= 1000;
        Ok(info)
    });

    in "ipc.offered":
    "sharing-hidden" needs [has::shareable_memory]: "Has a transport, and offers no sharing." => |h| h.hides_sharing = true;
    "sharing-without-transport" needs [has::shareable_memory]: "Offers sharing, and has no transport." =>
        |h| h.claim(|capabilities| capabilities.ipc_transports = Transports::NONE);

    "sharing-renewed" needs [has::shareable_memory]: "Returns another object for sharing in each call." =>
        |h| h.renews_sharing = true;

    in "backend.device-checked":
    "copies-of-nothing-unchecked": "Copies 0 bytes to and from devices that do not exist." =>
        |h| h.backend.copy(|reference, copy, stream| match copy.bytes {
            0 => forgiven(ErrorKind::InvalidArgument, reference.copy(copy, stream), ()),
            _ => reference.copy(copy, stream),
        });
    "streams-on-unknown-devices": "Creates streams of unknown devices on the first one." =>
        |h| h.backend.create_stream(|reference, device, options| {
            reference.create_stream(if device < reference.device_count() { device } else { 0 }, options)
        });
    "waits-for-unknown-devices": "Returns success from a wait for an unknown device." =>
        |h| h.backend.synchronize_device(|reference, device| {
            forgiven(ErrorKind::InvalidArgument, reference.synchronize_device(device), ())
        });
    "memory-of-unknown-devices": "Reports an unknown device as an invalid handle in `memory_info`." =>
        |h| h.backend.memory_info(|reference, device| {
            renamed(ErrorKind::InvalidArgument, ErrorKind::InvalidHandle, "memory_info", reference.memory_info(device))
        });
    "addresses-on-unknown-devices": "Returns addresses of page-locked memory on unknown devices." =>
        |h| h.host.device_address(|host, ptr, _| host.device_address(ptr, 0));
    "handles-of-unknown-devices": "Creates handles of unknown devices on the first one." =>
        |h| h.backend.create_blas_handle(|reference, device, options| {
            reference.create_blas_handle(if device < reference.device_count() { device } else { 0 }, options)
        });

    in "backend.live-objects":
    "events-not-counted": "Leaves events out of its counts." => |h| h.count(|live| live.events = 0);
    "blocks-counted-twice": "Counts each block of device memory twice." => |h| h.count(|live| live.allocations *= 2);
    "executables-not-counted" needs [has::capture]: "Leaves executable graphs out of its counts." => |h| {
        let alive = not_counted(h);
        h.count(move |live| live.graphs -= alive.get());
    };
    "registrations-not-counted" needs [has::host_register]: "Leaves registered memory out of its counts." => |h| {
        let alive = Shared::new(0_u64);
        let (more, less) = (alive.clone(), alive.clone());
        h.host.register(move |host, ptr, bytes, options| {
            host.register(ptr, bytes, options)?;
            more.set(more.get() + 1);
            Ok(())
        });
        h.host.unregister(move |host, ptr| {
            host.unregister(ptr)?;
            less.set(less.get() - 1);
            Ok(())
        });
        h.count(move |live| live.host_allocations -= alive.get());
    };
    "read-only-registrations-not-counted" needs [has::host_register_read_only]: "Leaves read-only registrations out of its counts." =>
    |h| {
        let alive = Shared::<std::collections::HashSet<highwater_hal::HostPtr>>::default();
        let (made, gone) = (alive.clone(), alive.clone());
        h.host.register(move |host, ptr, bytes, options| {
            host.register(ptr, bytes, options)?;
            if options.read_only {
                made.with(|made| made.insert(ptr));
            }
            Ok(())
        });
        h.host.unregister(move |host, ptr| {
            host.unregister(ptr)?;
            gone.with(|gone| gone.remove(&ptr));
            Ok(())
        });
        h.count(move |live| live.host_allocations -= alive.with(|alive| alive.len() as u64));
    };
    "foreign-streams-counted" needs [has::foreign_objects]: "Counts the ids of foreign streams as streams." => |h| {
        let alive = Shared::<std::collections::HashSet<StreamId>>::default();
        let (made, gone) = (alive.clone(), alive.clone());
        h.backend.stream_from_raw(move |reference, device, raw| {
            let stream = reference.stream_from_raw(device, raw)?;
            made.with(|made| made.insert(stream));
            Ok(stream)
        });
        h.backend.destroy_stream(move |reference, stream| {
            reference.destroy_stream(stream)?;
            gone.with(|gone| gone.remove(&stream));
            Ok(())
        });
        h.count(move |live| live.streams += alive.with(|alive| alive.len() as u64));
    };
    "mappings-not-counted" [by_two_processes] needs [has::shareable_memory]: "Leaves opened memory out of its counts." =>
        |h| h.count(|live| live.mappings = 0);
    "mappings-leaked" [by_two_processes] needs [has::shareable_memory]: "Keeps memory mapped that was closed." => |h| {
        let opened = Shared::<HashMap<DevicePtr, u64>>::default();
        let known = opened.clone();
        h.sharing.open_memory(move |sharing, device, handle| {
            let ptr = sharing.open_memory(device, handle)?;
            opened.with(|opened| *opened.entry(ptr).or_default() += 1);
            Ok(ptr)
        });
        h.sharing.close_memory(move |sharing, device, ptr| {
            let open = known.with(|known| known.get_mut(&ptr).filter(|count| **count > 0).map(|count| *count -= 1));
            if open.is_some() { Ok(()) } else { sharing.close_memory(device, ptr) }
        });
    };
    "destroyed-events-counted": "Counts events that were destroyed." => |h| {
        let destroyed = Shared::new(0_u64);
        let gone = destroyed.clone();
        h.backend.destroy_event(move |reference, event| {
            reference.destroy_event(event)?;
            gone.set(gone.get() + 1);
            Ok(())
        });
        h.count(move |live| live.events += destroyed.get());
    };
    "descriptors-not-counted" [by_two_processes] needs [DESCRIPTORS]: "Leaves descriptors out of its counts." =>
        |h| h.count(|live| live.descriptors = 0);
}

/// How many executable graphs are alive.
fn not_counted(h: &mut Hooks) -> Shared<u64> {
    let alive = Shared::new(0_u64);
    let (more, less) = (alive.clone(), alive.clone());
    h.backend.instantiate_graph(move |reference, graph| {
        let executable = reference.instantiate_graph(graph)?;
        more.set(more.get() + 1);
        Ok(executable)
    });
    h.backend.destroy_graph_exec(move |reference, executable| {
        reference.destroy_graph_exec(executable)?;
        less.set(less.get() - 1);
        Ok(())
    });
    alive
}

/// A wrong tag for ids, and the right one back.
#[derive(Clone)]
struct Tags {
    wrong: BackendTag,
    right: Shared<Option<BackendTag>>,
}

impl Tags {
    fn new() -> Self {
        Self { wrong: BackendTag::next(), right: Shared::default() }
    }

    fn disguise<I: ObjectId>(&self, id: I) -> I {
        self.right.set(Some(id.parts().tag));
        forge(IdParts { tag: self.wrong, ..id.parts() })
    }

    fn reveal<I: ObjectId>(&self, id: I) -> I {
        match self.right.get() {
            Some(tag) if id.parts().tag == self.wrong => forge(IdParts { tag, ..id.parts() }),
            _ => id,
        }
    }
}
