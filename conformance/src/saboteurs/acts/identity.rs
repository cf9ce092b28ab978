//! Who the backend is, and what its devices are.

use std::collections::HashMap;

use highwater_hal::{
    BackendTag, DevicePtr, ErrorKind, EventId, GraphId, HostPtr, IdParts, ObjectId, StreamId, Transports,
};

use super::super::Saboteur;
use super::super::honest::{is, wrong};
use super::super::hooks::Hooks;
use super::super::note::Note;
use crate::cases::forge;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new("identity-changes", "identity.stable", "Has one version more while a stream is alive.", |h| {
        h.identity = Some(|identity| {
            let mut other = identity.clone();
            other.versions.push(("saboteur".to_owned(), "2".to_owned()));
            other
        });
    }),
    Saboteur::new("device-count-changes", "identity.stable", "Counts one device less every second time.", |h| {
        let asked = Note::new(0_u32);
        h.backend.device_count(move |honest| {
            asked.set(asked.get() ^ 1);
            honest.device_count() - asked.get()
        });
    }),
    Saboteur::new(
        "allocators-differ",
        "identity.stable",
        "Gives an allocator of page-locked memory each time that knows none of the blocks of the others.",
        |h| {
            let owners = Note::<HashMap<HostPtr, u64>>::default();
            let known = owners.clone();
            h.host.allocate(move |host, bytes, options| {
                let ptr = host.allocate(bytes, options)?;
                owners.with(|owners| owners.insert(ptr, host.serial));
                Ok(ptr)
            });
            h.host.free(move |host, ptr| {
                let own = known.with(|owners| owners.get(&ptr).is_none_or(|owner| *owner == host.serial));
                if own { host.free(ptr) } else { Err(wrong(ErrorKind::InvalidPointer, "free")) }
            });
        },
    ),
    Saboteur::new("events-with-another-tag", "identity.tagged", "Issues ids of events with another tag.", |h| {
        let tags = Tags::new();
        let made = tags.clone();
        h.backend.create_event(move |honest, device, options| Ok(made.disguise(honest.create_event(device, options)?)));
        h.event_in(move |event: EventId| tags.reveal(event));
    }),
    Saboteur::new("streams-on-the-first-device", "identity.tagged", "Issues ids of streams that name device 0.", |h| {
        let true_ids = Note::<HashMap<StreamId, StreamId>>::default();
        let issued = true_ids.clone();
        h.backend.create_stream(move |honest, device, options| {
            let stream = honest.create_stream(device, options)?;
            let id = forge::<StreamId>(IdParts { device: 0, ..stream.parts() });
            issued.with(|ids| ids.insert(id, stream));
            Ok(id)
        });
        h.stream_in(move |stream| true_ids.with(|ids| ids.get(&stream).copied().unwrap_or(stream)));
    }),
    Saboteur::new("graphs-with-another-tag", "identity.tagged", "Issues ids of graphs with another tag.", |h| {
        let tags = Tags::new();
        let (made, used) = (tags.clone(), tags.clone());
        h.backend.end_capture(move |honest, stream| Ok(made.disguise(honest.end_capture(stream)?)));
        h.backend.instantiate_graph(move |honest, graph| honest.instantiate_graph(used.reveal(graph)));
        h.backend.destroy_graph(move |honest, graph: GraphId| honest.destroy_graph(tags.reveal(graph)));
    }),
    Saboteur::new("no-device", "devices.some", "Opens with no device.", |h| h.backend.device_count(|_| 0)),
    Saboteur::new("ordinal-from-one", "devices.some", "Counts the devices from 1 in their descriptions.", |h| {
        h.backend.device_info(|honest, device| {
            let mut info = honest.device_info(device)?;
            info.ordinal += 1;
            Ok(info)
        });
    }),
    Saboteur::new("one-uuid-for-all", "devices.uuid", "Gives every device the UUID of the first.", |h| {
        h.backend.device_info(|honest, device| {
            let mut info = honest.device_info(device)?;
            info.uuid = honest.device_info(0)?.uuid;
            Ok(info)
        });
    }),
    Saboteur::new("uuid-counts", "devices.uuid", "Gives a device another UUID each time.", |h| {
        let asked = Note::new(0_u8);
        h.backend.device_info(move |honest, device| {
            asked.with(|asked| *asked = asked.wrapping_add(1));
            let mut info = honest.device_info(device)?;
            info.uuid[15] ^= asked.get();
            Ok(info)
        });
    }),
    Saboteur::new("uuid-of-the-process", "devices.uuid", "Gives a device another UUID in each process.", |h| {
        h.backend.device_info(|honest, device| {
            let mut info = honest.device_info(device)?;
            let process = std::process::id().to_le_bytes();
            info.uuid.iter_mut().zip(process).for_each(|(byte, of)| *byte ^= of);
            Ok(info)
        });
    })
    .by_two_processes(),
    Saboteur::new(
        "capabilities-change",
        "devices.capabilities-stable",
        "Wants a workspace of another size while a stream is alive.",
        |h| {
            h.backend.capabilities(|honest, device| {
                let mut capabilities = honest.capabilities(device)?;
                capabilities.blas_workspace_bytes += usize::from(honest.live_objects().streams > 0) * 4096;
                Ok(capabilities)
            });
        },
    ),
    Saboteur::new("more-free-than-total", "memory.info", "Has more bytes free than there are.", |h| {
        h.backend.memory_info(|honest, device| {
            let mut info = honest.memory_info(device)?;
            info.free = info.total + 1;
            Ok(info)
        });
    }),
    Saboteur::new("total-in-kilobytes", "memory.info", "Gives the total memory in units of 1000 bytes.", |h| {
        h.backend.memory_info(|honest, device| {
            let mut info = honest.memory_info(device)?;
            info.total /= 1000;
            info.free /= 1000;
            Ok(info)
        });
    }),
    Saboteur::new("sharing-hidden", "ipc.offered", "Has a transport, and offers no sharing.", |h| {
        h.hides_sharing = true;
    }),
    Saboteur::new("sharing-without-transport", "ipc.offered", "Offers sharing, and has no transport.", |h| {
        h.claim(|capabilities| capabilities.ipc_transports = Transports::NONE);
    }),
    Saboteur::new(
        "streams-on-unknown-devices",
        "backend.device-checked",
        "Makes streams for devices that are not there, on the first.",
        |h| {
            h.backend.create_stream(|honest, device, options| {
                honest.create_stream(if device < honest.device_count() { device } else { 0 }, options)
            });
        },
    ),
    Saboteur::new(
        "waits-for-unknown-devices",
        "backend.device-checked",
        "Has waited for devices that are not there.",
        |h| {
            h.backend.synchronize_device(|honest, device| {
                let waited = honest.synchronize_device(device);
                if is(&waited, ErrorKind::InvalidArgument) { Ok(()) } else { waited }
            });
        },
    ),
    Saboteur::new(
        "memory-of-unknown-devices",
        "backend.device-checked",
        "Refuses to describe the memory of devices that are not there, but as an unknown handle.",
        |h| {
            h.backend.memory_info(|honest, device| match honest.memory_info(device) {
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                    Err(wrong(ErrorKind::InvalidHandle, "memory_info"))
                }
                info => info,
            });
        },
    ),
    Saboteur::new(
        "addresses-on-unknown-devices",
        "backend.device-checked",
        "Knows the addresses of page-locked memory on devices that are not there.",
        |h| h.host.device_address(|host, ptr, _| host.device_address(ptr, 0)),
    ),
    Saboteur::new(
        "handles-of-unknown-devices",
        "backend.device-checked",
        "Makes handles for devices that are not there, on the first.",
        |h| {
            h.backend.create_blas_handle(|honest, device, options| {
                honest.create_blas_handle(if device < honest.device_count() { device } else { 0 }, options)
            });
        },
    ),
    Saboteur::new("events-not-counted", "backend.live-objects", "Leaves events out of its counts.", |h| {
        h.count(|live| live.events = 0);
    }),
    Saboteur::new("blocks-counted-twice", "backend.live-objects", "Counts each block of device memory twice.", |h| {
        h.count(|live| live.allocations *= 2);
    }),
    Saboteur::new(
        "executables-not-counted",
        "backend.live-objects",
        "Leaves executable graphs out of its counts.",
        |h| {
            let alive = not_counted(h);
            h.count(move |live| live.graphs -= alive.get());
        },
    ),
    Saboteur::new(
        "registrations-not-counted",
        "backend.live-objects",
        "Leaves registered memory out of its counts.",
        |h| {
            let alive = Note::new(0_u64);
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
        },
    ),
    Saboteur::new("mappings-not-counted", "backend.live-objects", "Leaves opened memory out of its counts.", |h| {
        h.count(|live| live.mappings = 0);
    })
    .by_two_processes(),
    Saboteur::new("mappings-leaked", "backend.live-objects", "Keeps memory mapped that was closed.", |h| {
        let opened = Note::<HashMap<DevicePtr, u64>>::default();
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
    })
    .by_two_processes(),
    Saboteur::new("destroyed-events-counted", "backend.live-objects", "Counts events that were destroyed.", |h| {
        let destroyed = Note::new(0_u64);
        let gone = destroyed.clone();
        h.backend.destroy_event(move |honest, event| {
            honest.destroy_event(event)?;
            gone.set(gone.get() + 1);
            Ok(())
        });
        h.count(move |live| live.events += destroyed.get());
    }),
    Saboteur::new("descriptors-not-counted", "backend.live-objects", "Leaves descriptors out of its counts.", |h| {
        h.count(|live| live.descriptors = 0);
    })
    .by_two_processes(),
];

/// How many executable graphs are alive.
fn not_counted(h: &mut Hooks) -> Note<u64> {
    let alive = Note::new(0_u64);
    let (more, less) = (alive.clone(), alive.clone());
    h.backend.instantiate_graph(move |honest, graph| {
        let executable = honest.instantiate_graph(graph)?;
        more.set(more.get() + 1);
        Ok(executable)
    });
    h.backend.destroy_graph_exec(move |honest, executable| {
        honest.destroy_graph_exec(executable)?;
        less.set(less.get() - 1);
        Ok(())
    });
    alive
}

/// A wrong tag for ids, and the right one back.
#[derive(Clone)]
struct Tags {
    wrong: BackendTag,
    right: Note<Option<BackendTag>>,
}

impl Tags {
    fn new() -> Self {
        Self { wrong: BackendTag::next(), right: Note::default() }
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
