//! Streams.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::calls::ok;
use crate::calls::{Pointer, cu};
use crate::rig::{
    Counter, Gate, NOT_READY, bytes_at, event, kinds_of, load, memory, on_another_thread, pinned, start, stream, warm,
};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::Log;
use highwater_simulated_harness::rules;

rules! {
    "stream.query" Driver Shared query: "a stream with work answers 600, and one without 0";
    "stream.independent" Driver Shared independent: "a stream goes on while another is blocked";
    "stream.made-with" Driver Shared made_with: "streams tell their flags, priority, context and an id of their own; priorities out of range are clamped";
    "stream.priorities" Driver Shared priorities: "priorities are counted down from 0";
    "stream.default-numbers" Driver Shared defaults: "0 and 1 are the legacy stream and 2 the thread's own";
    "stream.legacy-waits" Driver Shared legacy: "the legacy stream and blocking streams wait for each other, and non-blocking ones do not";
    "stream.host-functions" Driver Shared host_functions: "host functions are called in the order of the stream, each once";
    "stream.destroyed-with-work" Driver Shared destroyed: "a stream is destroyed without waiting, and its work is still done";
}

fn query(log: &mut Log) -> Answer {
    let stream = stream()?;
    warm(stream)?;
    log.is("without work", cu!(cuStreamQuery(stream)), 0);
    let gate = Gate::on(stream)?;
    log.is("with work", cu!(cuStreamQuery(stream)), NOT_READY);
    gate.open();
    log.is("waited for", cu!(cuStreamSynchronize(stream)), 0);
    log.is("after that", cu!(cuStreamQuery(stream)), 0);
    Ok(())
}

fn independent(log: &mut Log) -> Answer {
    let (first, second, block) = (stream()?, stream()?, memory(4096)?);
    warm(first)?;
    let gate = Gate::on(first)?;
    ok!(cu cuMemsetD8Async(block, 5, 4096, second));
    log.is("the second stream", kinds_of(load::<u8>(block, 4096, second)?), vec![5]);
    log.is("while the first", (cu!(cuStreamQuery(first)), gate.is_open()), (NOT_READY, false));
    gate.open();
    ok!(cu cuStreamSynchronize(first));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn made_with(log: &mut Log) -> Answer {
    let context = start(0)?;
    let (mut least, mut greatest) = (9, 9);
    ok!(cu cuCtxGetStreamPriorityRange(&mut least, &mut greatest));
    for (flags, asked) in [(0, 0), (1, greatest), (1, greatest - 100), (1, least + 100)] {
        let (mut made, mut priority, mut seen, mut of, mut id) = (0, 9, 9, 0, 0);
        log.is(
            &format!("flags {flags}, priority {asked}"),
            cu!(cuStreamCreateWithPriority(&mut made, flags, asked)),
            0,
        );
        ok!(cu cuStreamGetPriority(made, &mut priority));
        ok!(cu cuStreamGetFlags(made, &mut seen));
        ok!(cu cuStreamGetCtx(made, &mut of));
        ok!(cu cuStreamGetId(made, &mut id));
        let expected = asked.clamp(greatest, least);
        log.is("flags, priority, context", (seen, priority, of == context), (flags, expected, true));
        let (mut other, mut other_id) = (0, 0);
        ok!(cu cuStreamCreate(&mut other, 1));
        ok!(cu cuStreamGetId(other, &mut other_id));
        log.is("ids differ", id == other_id, false);
        ok!(cu cuStreamDestroy_v2(made));
        ok!(cu cuStreamDestroy_v2(other));
    }
    log.is("unknown flags", cu!(cuStreamCreate(&mut 0, 0x100)), 1);
    log.is("null destroyed", cu!(cuStreamDestroy_v2(0)), 400);
    Ok(())
}

fn priorities(log: &mut Log) -> Answer {
    let (mut least, mut greatest) = (9, 9);
    log.is("code", cu!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest)), 0);
    log.is("least", least, 0);
    log.is("greatest is below", greatest < 0, true);
    // The device's.
    log.observed("greatest", greatest);
    Ok(())
}

fn defaults(log: &mut Log) -> Answer {
    let context = start(0)?;
    let block = memory(64)?;
    for number in [0, 1, 2] {
        let mut of = 0;
        let codes = (cu!(cuStreamGetCtx(number, &mut of)), of == context);
        log.is(&format!("context of {number}"), codes, (0, true));
        log.is(&format!("fill in {number}"), cu!(cuMemsetD8Async(block, number as u8 + 1, 64, number)), 0);
        log.is(&format!("waited for {number}"), cu!(cuStreamSynchronize(number)), 0);
        log.is(&format!("query of {number}"), cu!(cuStreamQuery(number)), 0);
    }
    let other = stream()?;
    log.is("the last fill", kinds_of(load::<u8>(block, 64, other)?), vec![3]);
    warm(2)?;
    let gate = Gate::on(2)?;
    let there = on_another_thread(context, || cu!(cuStreamQuery(2)))?;
    log.is("2, blocked on this thread, on another", (cu!(cuStreamQuery(2)), there), (NOT_READY, 0));
    gate.open();
    ok!(cu cuStreamSynchronize(2));
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

fn legacy(log: &mut Log) -> Answer {
    let (mut blocking, free, block) = (0, stream()?, memory(4096)?);
    ok!(cu cuStreamCreate(&mut blocking, 0));
    warm(blocking)?;
    warm(free)?;
    let gate = Gate::on(blocking)?;
    ok!(cu cuMemsetD8Async(block, 1, 64, 0));
    log.is("the legacy stream behind a blocking one", cu!(cuStreamQuery(0)), NOT_READY);
    ok!(cu cuMemsetD8Async(block + 1024, 1, 64, free));
    log.is("a non-blocking one beside it", (cu!(cuStreamSynchronize(free)), gate.is_open()), (0, false));
    gate.open();
    log.is("waited for", cu!(cuStreamSynchronize(0)), 0);
    ok!(cu cuStreamSynchronize(blocking));
    let gate = Gate::on(0)?;
    ok!(cu cuMemsetD8Async(block, 2, 64, blocking));
    log.is("a blocking stream behind the legacy one", cu!(cuStreamQuery(blocking)), NOT_READY);
    ok!(cu cuMemsetD8Async(block + 1024, 2, 64, free));
    log.is("a non-blocking one beside that", (cu!(cuStreamSynchronize(free)), gate.is_open()), (0, false));
    gate.open();
    log.is("the fill behind it", kinds_of(load::<u8>(block, 64, blocking)?), vec![2]);
    ok!(cu cuMemFree_v2(block));
    Ok(())
}

unsafe extern "C" fn call_the_driver(answer: Pointer) {
    // SAFETY: answers live for ever.
    unsafe { &*answer.cast::<AtomicU32>() }.store(cu!(cuDeviceGetCount(&mut 0)), Ordering::SeqCst);
}

fn host_functions(log: &mut Log) -> Answer {
    let (stream, block, host, counter) = (stream()?, memory(4096)?, pinned(4096)?, Counter::new());
    for round in 1..=5u8 {
        ok!(cu cuMemsetD8Async(block, round, 4096, stream));
        ok!(cu cuMemcpyDtoHAsync_v2(host, block, 4096, stream));
        log.is("queued", counter.count_on(stream), 0);
    }
    ok!(cu cuStreamSynchronize(stream));
    log.is("calls", counter.value(), 5);
    log.is("the last copy", kinds_of(bytes_at(host, 4096)), vec![5]);
    let gate = Gate::on(stream)?;
    ok!(cu cuMemsetD8Async(block, 9, 4096, stream));
    ok!(cu cuMemcpyDtoHAsync_v2(host, block, 4096, stream));
    log.is("one behind a gate is queued", counter.count_on(stream), 0);
    log.is("and is not called", (counter.value(), gate.is_open()), (5, false));
    gate.open();
    ok!(cu cuStreamSynchronize(stream));
    log.is("until the gate is open", (counter.value(), kinds_of(bytes_at(host, 4096))), (6, vec![9]));
    let answer: &'static AtomicU32 = Box::leak(Box::default());
    ok!(cu cuLaunchHostFunc(stream, Some(call_the_driver), std::ptr::from_ref(answer).cast_mut().cast()));
    ok!(cu cuStreamSynchronize(stream));
    log.is("a call of the driver in one", answer.load(Ordering::SeqCst), 800);
    log.is("a null one", cu!(cuLaunchHostFunc(stream, None, std::ptr::null_mut())), 1);
    ok!(cu cuMemFree_v2(block));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}

fn destroyed(log: &mut Log) -> Answer {
    let (stream, other, block, done) = (stream()?, stream()?, memory(4096)?, event(2)?);
    warm(stream)?;
    let gate = Gate::on(stream)?;
    ok!(cu cuMemsetD8Async(block, 6, 4096, stream));
    ok!(cu cuEventRecord(done, stream));
    log.is("destroyed while blocked", (cu!(cuStreamDestroy_v2(stream)), gate.is_open()), (0, false));
    log.is("its last event", cu!(cuEventQuery(done)), NOT_READY);
    gate.open();
    log.is("waited for that event", cu!(cuEventSynchronize(done)), 0);
    log.is("its work", kinds_of(load::<u8>(block, 4096, other)?), vec![6]);
    ok!(cu cuMemFree_v2(block));
    Ok(())
}
