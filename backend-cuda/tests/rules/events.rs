//! Events.

use crate::calls::cu;
use crate::calls::ok;
use crate::rig::{Gate, NOT_READY, bytes_at, event, kinds_of, memory, pinned, stream, warm};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;

rules! {
    "event.never-recorded" Driver Shared never: "an event that was never recorded is done, and nothing to wait for";
    "event.recorded" Driver Shared recorded: "an event answers 600 until what was before it is done";
    "event.waited-for" Driver Shared waited_for: "a stream that waits for an event sees all that was before it";
    "event.moves" Driver Shared moves: "recording again moves an event, and who waits already waits for the older record";
    "event.elapsed" Driver Shared elapsed: "elapsed time needs two records with timing (400) that are done (600)";
    "event.flags" Driver Shared flags: "an event between processes has no timing, and unknown flags answer 1";
    "event.destroyed" Driver Shared destroyed: "an event may be destroyed while it is waited for";
}

fn never(log: &mut Log) -> Answer {
    let (stream, done) = (stream()?, event(2)?);
    log.is("query", cu!(cuEventQuery(done)), 0);
    log.is("synchronize", cu!(cuEventSynchronize(done)), 0);
    log.is("a stream waits", cu!(cuStreamWaitEvent(stream, done, 0)), 0);
    log.is("the stream", cu!(cuStreamSynchronize(stream)), 0);
    ok!(cu cuEventDestroy_v2(done));
    Ok(())
}

fn recorded(log: &mut Log) -> Answer {
    let stream = stream()?;
    warm(stream)?;
    for (what, flags) in [("timing", 0), ("no timing", 2), ("blocking", 3), ("interprocess", 6)] {
        let done = event(flags)?;
        let gate = Gate::on(stream)?;
        log.is(&format!("{what}: record"), cu!(cuEventRecord(done, stream)), 0);
        log.is(&format!("{what}: before"), (cu!(cuEventQuery(done)), gate.is_open()), (NOT_READY, false));
        gate.open();
        log.is(&format!("{what}: synchronize"), cu!(cuEventSynchronize(done)), 0);
        log.is(&format!("{what}: after"), cu!(cuEventQuery(done)), 0);
        ok!(cu cuEventDestroy_v2(done));
    }
    Ok(())
}

fn waited_for(log: &mut Log) -> Answer {
    let (first, second, done) = (stream()?, stream()?, event(2)?);
    let (block, host) = (memory(65_536)?, pinned(65_536)?);
    warm(first)?;
    ok!(cu cuMemsetD8Async(block, 1, 65_536, first));
    let gate = Gate::on(first)?;
    ok!(cu cuMemsetD8Async(block, 7, 65_536, first));
    ok!(cu cuEventRecord(done, first));
    log.is("wait", cu!(cuStreamWaitEvent(second, done, 0)), 0);
    ok!(cu cuMemcpyDtoHAsync_v2(host, block, 65_536, second));
    log.is("the stream that waits", (cu!(cuStreamQuery(second)), gate.is_open()), (NOT_READY, false));
    gate.open();
    ok!(cu cuStreamSynchronize(second));
    log.is("what it saw", kinds_of(bytes_at(host, 65_536)), vec![7]);
    ok!(cu cuMemFree_v2(block));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}

fn moves(log: &mut Log) -> Answer {
    let (blocked, idle, waiting, moved) = (stream()?, stream()?, stream()?, event(2)?);
    warm(blocked)?;
    let gate = Gate::on(blocked)?;
    ok!(cu cuEventRecord(moved, blocked));
    ok!(cu cuStreamWaitEvent(waiting, moved, 0));
    log.is("recorded on the blocked stream", cu!(cuEventQuery(moved)), NOT_READY);
    ok!(cu cuEventRecord(moved, idle));
    log.is("recorded again on an idle one", (cu!(cuEventSynchronize(moved)), gate.is_open()), (0, false));
    log.is("who waited before", (cu!(cuStreamQuery(waiting)), gate.is_open()), (NOT_READY, false));
    gate.open();
    log.is("until the first record is done", cu!(cuStreamSynchronize(waiting)), 0);
    Ok(())
}

fn elapsed(log: &mut Log) -> Answer {
    let stream = stream()?;
    let (begin, end, plain) = (event(0)?, event(0)?, event(2)?);
    let mut time = -1f32;
    log.is("never recorded", cu!(cuEventElapsedTime(&mut time, begin, end)), 400);
    ok!(cu cuEventRecord(begin, stream));
    ok!(cu cuEventSynchronize(begin));
    log.is("the second never recorded", cu!(cuEventElapsedTime(&mut time, begin, end)), 400);
    let gate = Gate::on(stream)?;
    ok!(cu cuEventRecord(end, stream));
    ok!(cu cuEventRecord(plain, stream));
    log.is("not done", (cu!(cuEventElapsedTime(&mut time, begin, end)), gate.is_open()), (NOT_READY, false));
    gate.open();
    ok!(cu cuStreamSynchronize(stream));
    log.is("done", (cu!(cuEventElapsedTime(&mut time, begin, end)), time >= 0.0), (0, true));
    log.is("backwards", (cu!(cuEventElapsedTime(&mut time, end, begin)), time <= 0.0), (0, true));
    log.is("one without timing", cu!(cuEventElapsedTime(&mut time, begin, plain)), 400);
    Ok(())
}

fn flags(log: &mut Log) -> Answer {
    for (flags, code) in [(0, 0), (1, 0), (2, 0), (3, 0), (6, 0), (7, 0), (4, 1), (5, 1), (0x100, 1)] {
        let mut made = 0;
        let seen = cu!(cuEventCreate(&mut made, flags));
        log.is(&format!("flags {flags}"), seen, code);
        if seen == 0 {
            log.is(&format!("flags {flags}: destroyed"), cu!(cuEventDestroy_v2(made)), 0);
        }
    }
    Ok(())
}

fn destroyed(log: &mut Log) -> Answer {
    let (first, second, done) = (stream()?, stream()?, event(2)?);
    warm(first)?;
    let gate = Gate::on(first)?;
    ok!(cu cuEventRecord(done, first));
    ok!(cu cuStreamWaitEvent(second, done, 0));
    log.is("destroyed", (cu!(cuEventDestroy_v2(done)), gate.is_open()), (0, false));
    log.is("who waits for it", cu!(cuStreamQuery(second)), NOT_READY);
    gate.open();
    log.is("goes on", cu!(cuStreamSynchronize(second)), 0);
    Ok(())
}
