//! Importers that are killed anywhere, while the exporter drops, frees and uses its memory again.
//!
//! Every buffer has one value of its own, which importers write again and again: what anybody writes late, or what is
//! freed early, shows as another buffer's value. `highwater soak ipc` does the same for hours.

use std::time::{Duration, Instant};

use highwater_core::{DeviceBuffer, ErrorKind, SplitMix64, Ticket};
use highwater_mock::MockOptions;

use crate::Exporter;
use crate::peer::{Peer, until};

const FOR: Duration = Duration::from_secs(3);
const IMPORTERS: usize = 3;
const LEN: usize = 2048;
/// Room for few buffers more than are alive, so that freed memory is used again at once.
const BUFFERS: usize = 6;
const DEVICE_BYTES: u64 = (BUFFERS as u64 + IMPORTERS as u64 * 2 + 2) * LEN as u64 * 4;

struct Shared {
    buffer: DeviceBuffer<u32>,
    ticket: Ticket,
    value: u32,
}

/// An importer, and the values of what it has open, which are their names as well.
struct Victim {
    peer: Peer,
    open: Vec<u32>,
}

impl Victim {
    fn start() -> Self {
        Self { peer: Peer::start_with("latency=50us", |_| {}), open: Vec::new() }
    }

    /// What it has open is what it was, though it may be gone in the exporter.
    fn check(&mut self) {
        for value in &self.open {
            assert_eq!(self.peer.tell(&format!("read b{value}")), value.to_string());
        }
    }
}

#[test]
fn importers_killed_at_any_step_lose_no_memory_and_spoil_none() {
    let exporter = Exporter::with(MockOptions::new().with_memory_bytes(DEVICE_BYTES).with_checks());
    // The same numbers in every run.
    let mut random = SplitMix64::new(7);
    let mut below = |end: usize| random.draw() as usize % end;
    let mut victims: Vec<_> = (0..IMPORTERS).map(|_| Victim::start()).collect();
    let mut shared: Vec<Shared> = Vec::new();
    let (mut value, mut kills) = (0, 0);
    let start = Instant::now();
    // A machine that is so busy that hardly anything happens goes on a little longer.
    while start.elapsed() < FOR || kills < 5 {
        if shared.len() == BUFFERS {
            shared.swap_remove(below(BUFFERS));
        }
        value += 1;
        match exporter.runtime.device(0).unwrap().allocate_shared::<u32>(LEN) {
            Ok(buffer) => {
                exporter.stream.fill(&buffer, value).unwrap();
                let ticket = buffer.share().unwrap();
                shared.push(Shared { buffer, ticket, value });
            }
            // Importers have all that was freed.
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
        }
        let at = below(IMPORTERS);
        let victim = &mut victims[at];
        victim.check();
        // At most so much may wait in limbo for one importer.
        while victim.open.len() > 1 {
            victim.peer.tell(&format!("drop b{}", victim.open.remove(0)));
        }
        let target = (!shared.is_empty()).then(|| &shared[below(shared.len())]);
        let Some(target) = target.filter(|target| !victim.open.contains(&target.value)) else { continue };
        let name = target.value;
        let steps = [
            format!("open b{name} {}", target.ticket),
            format!("fill b{name} {name} {}", 1 + below(40)),
            format!("read b{name}"),
            format!("fill b{name} {name} 3"),
            "trim".to_owned(),
            format!("drop b{name}"),
        ];
        if below(3) > 0 {
            let done = 1 + below(steps.len());
            steps.iter().take(done).for_each(|step| drop(victim.peer.tell(step)));
            if done < steps.len() {
                victim.open.push(name);
            }
        } else {
            // Killed somewhere in the steps, or in what the exporter does for them.
            steps.iter().for_each(|step| victim.peer.say(step));
            if below(2) == 0 {
                shared.swap_remove(below(shared.len()));
            }
            std::thread::sleep(Duration::from_micros(below(3000) as u64));
            std::mem::replace(victim, Victim::start()).peer.kill();
            kills += 1;
        }
        for shared in &shared {
            assert_eq!(exporter.stream.download(&shared.buffer).unwrap(), vec![shared.value; LEN], "{}", shared.value);
        }
    }
    victims.iter_mut().for_each(Victim::check);
    shared.clear();
    victims.into_iter().for_each(|victim| assert!(victim.peer.quit().success()));
    until("the memory is back", || exporter.taken() == 0);
    until("the dead are forgotten", || exporter.runtime.statistics().sharing.peers == 0);
    let sharing = exporter.runtime.statistics().sharing;
    assert_eq!((sharing.exported_blocks, sharing.limbo_blocks), (0, 0));
    assert_eq!(exporter.gpu.violations(), []);
    exporter.end();
}
