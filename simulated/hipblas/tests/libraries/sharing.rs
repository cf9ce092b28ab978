//! Memory and events of other processes.

use std::process::Command;
use std::ptr::{null_mut, without_provenance_mut};

use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Hip, IpcHandle, Ptr, allocate, behind, download, event, gate_on, pinned, store, stream, upload};

/// Set to what the importing process is given.
const PEER: &str = "HIGHWATER_TEST_PEER";

const NONE: IpcHandle = IpcHandle([0; 64]);

fn hexadecimal(handle: &IpcHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn parse(text: &str) -> IpcHandle {
    let byte = |index: usize| u8::from_str_radix(&text[2 * index..][..2], 16).unwrap();
    IpcHandle(std::array::from_fn(byte))
}

/// Runs the test of this name in a process that is given the handles.
fn import(test: &str, handles: &[IpcHandle]) {
    import_by(Command::new(std::env::current_exe().unwrap()), test, handles);
}

/// Runs the test of this name in a process that sees only these devices.
fn import_seeing(test: &str, handles: &[IpcHandle], devices: &str) {
    let mut peer = Command::new(std::env::current_exe().unwrap());
    peer.env("HIP_VISIBLE_DEVICES", devices);
    import_by(peer, test, handles);
}

fn import_by(mut peer: Command, test: &str, handles: &[IpcHandle]) {
    let given: Vec<_> = handles.iter().map(hexadecimal).collect();
    let output = peer.args(["--exact", test, "--nocapture"]).env(PEER, given.join(",")).output().unwrap();
    let (text, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}{told}");
}

/// The handles that this process was given.
fn given() -> Option<Vec<IpcHandle>> {
    Some(std::env::var(PEER).ok()?.split(',').map(parse).collect())
}

fn export(memory: Ptr) -> IpcHandle {
    let mut handle = NONE;
    ok!(Hip.hipIpcGetMemHandle(&mut handle, memory));
    handle
}

fn open(handle: IpcHandle) -> Ptr {
    let mut memory = null_mut();
    ok!(Hip.hipIpcOpenMemHandle(&mut memory, handle, 1));
    memory
}

isolated! {
    fn memory_is_seen_by_another_process_from_the_address_on_that_was_exported(_) over ["rocm", "rocm6"] {
        if let Some(handles) = given() {
            let [start, inside] = [open(handles[0]), open(handles[1])];
            assert_eq!(inside, behind(start, 8));
            assert_eq!(download::<u32>(start, 4, null_mut()), [1, 2, 3, 4]);
            store(inside, &[9u32], null_mut());
            // Each open is closed.
            ok!(Hip.hipIpcCloseMemHandle(inside));
            assert_eq!(download::<u32>(start, 1, null_mut()), [1]);
            ok!(Hip.hipIpcCloseMemHandle(start));
            assert_eq!(code!(Hip.hipIpcCloseMemHandle(start)), 1);
            return;
        }
        let block = upload(&[1u32, 2, 3, 4], null_mut());
        import(
            "sharing::memory_is_seen_by_another_process_from_the_address_on_that_was_exported",
            &[export(block), export(behind(block, 8))],
        );
        assert_eq!(download::<u32>(block, 4, null_mut()), [1, 2, 9, 4]);
    }

    fn what_cannot_be_shared_is_refused(_) over ["rocm", "rocm6"] {
        let (mut handle, mut opened, mut ordered) = (NONE, null_mut(), null_mut());
        ok!(Hip.hipMallocAsync(&mut ordered, 4096, stream()));
        for memory in [Box::leak(Box::new(0u64)) as *mut u64 as Ptr, ordered, pinned(4096, 0), null_mut()] {
            assert_eq!(code!(Hip.hipIpcGetMemHandle(&mut handle, memory)), 1);
        }
        let own = export(allocate(4096));
        assert_eq!(code!(Hip.hipIpcOpenMemHandle(&mut opened, own, 1)), 201);
        for flags in [0, 2] {
            assert_eq!(code!(Hip.hipIpcOpenMemHandle(&mut opened, own, flags)), 1);
        }
        assert_eq!(code!(Hip.hipIpcOpenMemHandle(&mut opened, NONE, 1)), 1);
        assert_eq!(code!(Hip.hipIpcCloseMemHandle(without_provenance_mut(0x1000))), 1);
    }

    fn an_event_orders_32_records_in_another_process_in_7(7) over ["rocm"] {
        const TEST: &str = "sharing::an_event_orders_32_records_in_another_process_in_7";
        if let Some(handles) = given() {
            let stream = stream();
            let waits: Vec<_> = handles.iter().map(|handle| {
                let mut event = null_mut();
                ok!(Hip.hipIpcOpenEventHandle(&mut event, *handle));
                code!(Hip.hipStreamWaitEvent(stream, event, 0))
            }).collect();
            assert_eq!(waits, [1, 0, 0, 1]);
            return;
        }
        let handles: Vec<_> = [0, 1, 32, 33].into_iter().map(|records| {
            let (mut handle, shared) = (NONE, event(6));
            for _ in 0..records {
                ok!(Hip.hipEventRecord(shared, null_mut()));
            }
            ok!(Hip.hipIpcGetEventHandle(&mut handle, shared));
            handle
        }).collect();
        import(TEST, &handles);
    }

    fn a_record_does_not_reach_another_process_in_6(6) over ["rocm6"] {
        const TEST: &str = "sharing::a_record_does_not_reach_another_process_in_6";
        if let Some(handles) = given() {
            let (mut event, stream) = (null_mut(), stream());
            ok!(Hip.hipIpcOpenEventHandle(&mut event, handles[0]));
            // The record is pending.
            ok!(Hip.hipEventQuery(event));
            ok!(Hip.hipStreamWaitEvent(stream, event, 0));
            ok!(Hip.hipStreamSynchronize(stream));
            return;
        }
        let (mut handle, shared, busy) = (NONE, event(6), stream());
        let gate = gate_on(busy);
        ok!(Hip.hipEventRecord(shared, busy));
        ok!(Hip.hipIpcGetEventHandle(&mut handle, shared));
        // The record does not reach this process either.
        ok!(Hip.hipEventQuery(shared));
        ok!(Hip.hipEventSynchronize(shared));
        import(TEST, &[handle]);
        gate.open();
        ok!(Hip.hipStreamSynchronize(busy));
    }

    fn memory_of_an_ordinal_that_is_not_there_is_refused_in_7(_) over ["rocm", "rocm6"] with HIGHWATER_MOCK = "devices=2" {
        const TEST: &str = "sharing::memory_of_an_ordinal_that_is_not_there_is_refused_in_7";
        if let Some(handles) = given() {
            let mut memory = null_mut();
            let opened = code!(Hip.hipIpcOpenMemHandle(&mut memory, handles[0], 1));
            assert_eq!(opened, if highwater_simulated_harness::isolated::version() == Some(7) { 1 } else { 0 });
            return;
        }
        ok!(Hip.hipSetDevice(1));
        import_seeing(TEST, &[export(allocate(4096))], "1");
    }

    fn sharing_looks_at_no_capture(_) over ["rocm", "rocm6"] {
        if let Some(handles) = given() {
            let own = stream();
            ok!(Hip.hipStreamBeginCapture(own, 0));
            let memory = open(handles[0]);
            ok!(Hip.hipIpcCloseMemHandle(memory));
            ok!(Hip.hipStreamEndCapture(own, &mut null_mut()));
            return;
        }
        import("sharing::sharing_looks_at_no_capture", &[export(allocate(4096))]);
    }

    fn events_are_shared_when_they_were_made_for_it(_) over ["rocm", "rocm6"] {
        if let Some(handles) = given() {
            let (mut event, stream) = (null_mut(), stream());
            ok!(Hip.hipIpcOpenEventHandle(&mut event, handles[0]));
            ok!(Hip.hipStreamWaitEvent(stream, event, 0));
            ok!(Hip.hipStreamSynchronize(stream));
            ok!(Hip.hipEventSynchronize(event));
            return;
        }
        let (mut handle, shared) = (NONE, event(6));
        assert_eq!(code!(Hip.hipIpcGetEventHandle(&mut handle, event(2))), 9);
        assert_eq!(code!(Hip.hipIpcGetEventHandle(&mut handle, null_mut())), 400);
        ok!(Hip.hipIpcGetEventHandle(&mut handle, shared));
        assert_eq!(code!(Hip.hipIpcOpenEventHandle(&mut null_mut(), handle)), 201);
        ok!(Hip.hipEventRecord(shared, null_mut()));
        import("sharing::events_are_shared_when_they_were_made_for_it", &[handle]);
    }
}
