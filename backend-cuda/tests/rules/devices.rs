//! Two devices.

use std::os::unix::process::ExitStatusExt as _;

use crate::blas::{handle_on, single};
use crate::calls::ok;
use crate::calls::{Handle, PeerRows, blas, cu};
use crate::process::program_that_ends;
use crate::rig::{Gate, NOT_READY, event, kinds_of, load, memory, start, store, stream, upload, warm};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::{Log, need};
use highwater_simulated_harness::rules;

rules! {
    "devices.events" Devices Own events: "a stream waits for another device's event; recording on its stream and elapsed time across answer 400";
    "devices.interprocess-events" Devices Own interprocess_events: "a stream's wait for another device's interprocess event ends the process by SIGSEGV";
    "devices.peers" Devices Own peers: "peer access is enabled once, and copies between devices work without it";
    "devices.peer-rows" Devices Own peer_rows: "one call copies rows between devices, in the order of its stream, and returns before the earlier work is done";
    "devices.peer-copy-captured" Devices Own peer_copy_captured: "a peer copy in a capture answers 900 and loses it";
    "devices.free-elsewhere" Devices Own free_elsewhere: "memory is freed with another device's context current";
    "devices.handle-elsewhere" DevicesAndBlas Own handle_elsewhere: "a BLAS handle works with another device's context current";
}

/// Contexts of both devices; that of the first is current.
fn both() -> Answer<[Handle; 2]> {
    let first = start(0)?;
    let second = start(1)?;
    ok!(cu cuCtxSetCurrent(first));
    Ok([first, second])
}

fn events(log: &mut Log) -> Answer {
    let [first, second] = both()?;
    let (near, near_event, near_timed) = (stream()?, event(2)?, event(0)?);
    warm(near)?;
    ok!(cu cuCtxSetCurrent(second));
    let (far, far_event, far_timed) = (stream()?, event(2)?, event(0)?);
    warm(far)?;
    log.is("the first's event on the second's stream", cu!(cuEventRecord(near_event, far)), 400);
    log.is("the second's event on the first's stream", cu!(cuEventRecord(far_event, near)), 400);
    let gate = Gate::on(near)?;
    ok!(cu cuEventRecord(near_event, near));
    log.is("waited for across", cu!(cuStreamWaitEvent(far, near_event, 0)), 0);
    log.is("the stream that waits", (cu!(cuStreamQuery(far)), gate.is_open()), (NOT_READY, false));
    gate.open();
    log.is("it goes on", cu!(cuStreamSynchronize(far)), 0);
    ok!(cu cuEventRecord(far_timed, far));
    ok!(cu cuCtxSetCurrent(first));
    ok!(cu cuEventRecord(near_timed, near));
    ok!(cu cuStreamSynchronize(near));
    ok!(cu cuStreamSynchronize(far));
    log.is("elapsed time across", cu!(cuEventElapsedTime(&mut 0.0, near_timed, far_timed)), 400);
    Ok(())
}

pub(crate) const INTERPROCESS: &str = "interprocess-event";

fn interprocess_events(log: &mut Log) -> Answer {
    let ended = program_that_ends(INTERPROCESS)?.output().map_err(|error| error.to_string())?.status;
    log.is("the signal", ended.signal(), Some(libc::SIGSEGV));
    Ok(())
}

/// Runs in the process whose end the rule `devices.interprocess-events` observes.
pub(crate) fn wait_for_interprocess_event() -> Answer {
    let [_, second] = both()?;
    let (near, near_event) = (stream()?, event(6)?);
    ok!(cu cuEventRecord(near_event, near));
    ok!(cu cuCtxSetCurrent(second));
    Err(format!("the wait answers {}", cu!(cuStreamWaitEvent(stream()?, near_event, 0))))
}

fn peers(log: &mut Log) -> Answer {
    let [first, second] = both()?;
    let (stream, near, mut can) = (stream()?, memory(65_536)?, 9);
    ok!(cu cuCtxSetCurrent(second));
    let far = memory(65_536)?;
    ok!(cu cuCtxSetCurrent(first));
    for (value, when) in [(1, "without peer access"), (2, "with peer access")] {
        store(near, &[value; 65_536], stream)?;
        log.is(&format!("copied {when}"), cu!(cuMemcpyPeerAsync(far, second, near, first, 65_536, stream)), 0);
        ok!(cu cuMemsetD8Async(near, 0, 65_536, stream));
        log.is(&format!("copied back {when}"), cu!(cuMemcpyPeerAsync(near, first, far, second, 65_536, stream)), 0);
        log.is(&format!("bytes {when}"), kinds_of(load::<u8>(near, 65_536, stream)?), vec![value]);
        if value == 1 {
            log.is("can", (cu!(cuDeviceCanAccessPeer(&mut can, 0, 1)), can), (0, 1));
            log.is("enabled", cu!(cuCtxEnablePeerAccess(second, 0)), 0);
            log.is("enabled again", cu!(cuCtxEnablePeerAccess(second, 0)), 704);
        }
    }
    log.is("to itself", (cu!(cuDeviceCanAccessPeer(&mut can, 0, 0)), can), (0, 0));
    Ok(())
}

fn peer_rows(log: &mut Log) -> Answer {
    const SIZE: usize = 65_536;
    let [first, second] = both()?;
    let (stream, near, back) = (stream()?, memory(SIZE)?, memory(SIZE)?);
    ok!(cu cuCtxSetCurrent(second));
    let far = memory(SIZE)?;
    ok!(cu cuMemsetD8Async(far, 0xee, SIZE, 0));
    ok!(cu cuStreamSynchronize(0));
    ok!(cu cuCtxSetCurrent(first));
    let pattern: Vec<u8> = (0..SIZE).map(|index| (index * 7 + index / 251) as u8).collect();
    store(near, &pattern, stream)?;
    ok!(cu cuMemsetD8Async(back, 0xee, SIZE, stream));
    let gate = Gate::on(stream)?;
    let there = PeerRows::new((far + 5, 40, second), (near + 3, 50, first), 31, 1200);
    log.is("there", cu!(cuMemcpy3DPeerAsync(&there, stream)), 0);
    let home = PeerRows::new((back + 9, 50, first), (far + 5, 40, second), 31, 1200);
    log.is("and back", cu!(cuMemcpy3DPeerAsync(&home, stream)), 0);
    log.is("before the earlier work is done", gate.is_open(), false);
    gate.open();
    let mut expected = vec![0xee; SIZE];
    for row in 0..1200 {
        expected[9 + row * 50..][..31].copy_from_slice(&pattern[3 + row * 50..][..31]);
    }
    log.is("bytes", load::<u8>(back, SIZE, stream)? == expected, true);
    let narrow = PeerRows::new((far, 15, second), (near, 16, first), 16, 4);
    log.is("a narrow pitch", cu!(cuMemcpy3DPeerAsync(&narrow, stream)), 1);
    let none = PeerRows::new((far, 16, second), (near, 16, first), 16, 0);
    log.is("no rows", cu!(cuMemcpy3DPeerAsync(&none, stream)), 0);
    Ok(())
}

fn peer_copy_captured(log: &mut Log) -> Answer {
    let [first, second] = both()?;
    let (stream, near) = (stream()?, memory(4096)?);
    ok!(cu cuCtxSetCurrent(second));
    let far = memory(4096)?;
    ok!(cu cuCtxSetCurrent(first));
    ok!(cu cuStreamBeginCapture_v2(stream, 1));
    log.is("copy", cu!(cuMemcpyPeerAsync(far, second, near, first, 4096, stream)), 900);
    log.is("end", cu!(cuStreamEndCapture(stream, &mut 0)), 901);
    Ok(())
}

fn free_elsewhere(log: &mut Log) -> Answer {
    let [_, second] = both()?;
    let block = memory(4096)?;
    ok!(cu cuCtxSetCurrent(second));
    log.is("freed", cu!(cuMemFree_v2(block)), 0);
    log.is("freed again", cu!(cuMemFree_v2(block)), 1);
    Ok(())
}

fn handle_elsewhere(log: &mut Log) -> Answer {
    let [first, second] = both()?;
    let stream = stream()?;
    let handle = handle_on(stream)?;
    let (a, c) = (upload(&[1f32; 1024], stream)?, upload(&[0f32; 1024], stream)?);
    ok!(cu cuCtxSetCurrent(second));
    // An H200 answered 14 to the first product of a shape: its kernels were loaded into the context that was current.
    let code = single(handle, [32; 3], [a, a, c]);
    log.either("the product", code, 0, 14);
    ok!(cu cuCtxSetCurrent(first));
    let right = load::<f32>(c, 1024, stream)? == vec![32.0; 1024];
    log.is("its values, where it was enqueued", code != 0 || right, true);
    need("cublasDestroy", blas!(cublasDestroy_v2(handle)))
}
