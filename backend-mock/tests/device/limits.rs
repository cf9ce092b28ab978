use std::sync::Barrier;
use std::time::Instant;

use highwater_hal::{AllocateOptions, Backend, BlasKind, BlasOptions, ErrorKind, FillPattern, HostOptions};
use highwater_mock::{ENVIRONMENT_VARIABLE, MockOptions, Operation};

use crate::rig::{Rig, kind, millis, small};

#[test]
fn the_told_call_fails_without_effect_and_the_next_one_works() {
    let rig = Rig::new(
        small()
            .with_fault(Operation::Allocate, 2, ErrorKind::OutOfMemory)
            .with_fault("host_allocate", 1, ErrorKind::PermissionDenied)
            .with_fault("create_blas_handle", 1, ErrorKind::Vendor),
    );
    let options = AllocateOptions::new(1000);
    rig.gpu.allocate(0, &options).unwrap();
    let free = rig.gpu.memory_info(0).unwrap().free;
    let error = rig.gpu.allocate(0, &options).unwrap_err();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::OutOfMemory, "allocate"));
    assert_eq!(rig.gpu.memory_info(0).unwrap().free, free);
    rig.gpu.allocate(0, &options).unwrap();
    assert_eq!(kind(rig.host.allocate(64, &HostOptions::new())), ErrorKind::PermissionDenied);
    let blas = BlasOptions::new(BlasKind::Blas);
    assert_eq!(kind(rig.gpu.create_blas_handle(0, &blas)), ErrorKind::Vendor);
    assert_eq!(rig.gpu.live_objects().handles, 0);
    assert_eq!((rig.gpu.calls(Operation::Allocate), rig.gpu.calls(Operation::HostAllocate)), (3, 1));
}

#[test]
fn a_running_mock_can_be_told_to_fail_and_to_slow_down() {
    let rig = Rig::new(small());
    let block = rig.allocate(0, 64);
    rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
    rig.gpu.fail_call("fill", 2, ErrorKind::Vendor).unwrap();
    rig.fill(block, FillPattern::U8(2), 64, rig.stream).unwrap();
    assert_eq!(kind(rig.fill(block, FillPattern::U8(3), 64, rig.stream)), ErrorKind::Vendor);
    assert_eq!(rig.download::<u8>(block, 64, rig.stream), [2; 64]);
    assert_eq!(kind(rig.gpu.fail_call("fil", 1, ErrorKind::Vendor)), ErrorKind::InvalidArgument);
    assert_eq!(kind(rig.gpu.fail_call(Operation::Fill, 0, ErrorKind::Vendor)), ErrorKind::InvalidArgument);
    rig.gpu.set_latency(millis(30));
    let start = Instant::now();
    rig.fill(block, FillPattern::U8(4), 64, rig.stream).unwrap();
    rig.gpu.synchronize_stream(rig.stream).unwrap();
    assert!(start.elapsed() >= millis(30));
    let before = rig.gpu.total_calls();
    rig.gpu.query_stream(rig.stream).unwrap();
    assert_eq!(rig.gpu.total_calls(), before + 1);
}

#[test]
fn a_handle_fault_counts_the_calls_of_all_handles() {
    let rig = Rig::new(small());
    let mut handles = [(); 2].map(|()| rig.gpu.create_blas_handle(0, &BlasOptions::new(BlasKind::Blas)).unwrap());
    handles[0].set_stream(rig.stream).unwrap();
    rig.gpu.fail_call(Operation::SetStream, 3, ErrorKind::Vendor).unwrap();
    handles[0].set_stream(rig.stream).unwrap();
    handles[1].set_stream(rig.stream).unwrap();
    assert_eq!(kind(handles[0].set_stream(rig.stream)), ErrorKind::Vendor);
    handles[1].set_stream(rig.stream).unwrap();
    assert_eq!(rig.gpu.calls(Operation::SetStream), 5);
    drop(handles);
    assert_eq!(rig.gpu.calls(Operation::SetStream), 5);
}

#[test]
fn making_a_handle_of_one_device_delays_nobody_else() {
    let rig = Rig::new(small().with_devices(2).with_create_handle_latency(0, millis(600)));
    let blas = BlasOptions::new(BlasKind::Blas);
    let begun = Barrier::new(2);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| {
            begun.wait();
            let start = Instant::now();
            rig.gpu.create_blas_handle(0, &blas).unwrap();
            start.elapsed()
        });
        begun.wait();
        let start = Instant::now();
        rig.gpu.create_blas_handle(1, &blas).unwrap().set_stream(rig.stream(1)).unwrap();
        let block = rig.allocate(0, 64);
        rig.fill(block, FillPattern::U8(1), 64, rig.stream).unwrap();
        rig.gpu.synchronize_stream(rig.stream).unwrap();
        assert!(start.elapsed() < millis(300), "the other calls took {:?}", start.elapsed());
        assert!(slow.join().unwrap() >= millis(600));
    });
    rig.gpu.set_create_handle_latency(0, millis(0)).unwrap();
    let start = Instant::now();
    rig.gpu.create_blas_handle(0, &blas).unwrap();
    assert!(start.elapsed() < millis(300));
    assert_eq!(kind(rig.gpu.set_create_handle_latency(2, millis(1))), ErrorKind::InvalidArgument);
}

#[test]
fn devices_have_uuids_that_every_mock_gives_them() {
    let rig = Rig::new(small().with_devices(3));
    let identity = rig.gpu.identity();
    assert_eq!((identity.name.as_str(), identity.real_device), ("mock", false));
    let uuids: std::collections::HashSet<_> = (0..3).map(|d| rig.gpu.device_info(d).unwrap().uuid).collect();
    assert_eq!(uuids.len(), 3);
    assert_eq!(Rig::new(small()).gpu.device_info(0).unwrap().uuid, rig.gpu.device_info(0).unwrap().uuid);
    assert_eq!(kind(rig.gpu.capabilities(3)), ErrorKind::InvalidArgument);
}

/// In a process of its own, because the environment is the whole process's.
#[test]
fn the_environment_says_what_the_mock_is_like() {
    const CHILD: &str = "HIGHWATER_MOCK_TEST_ENVIRONMENT";
    if std::env::var_os(CHILD).is_none() {
        let child = |value: &str| {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "limits::the_environment_says_what_the_mock_is_like"])
                .env(CHILD, "1")
                .env(ENVIRONMENT_VARIABLE, value)
                .output()
                .unwrap()
        };
        assert!(child("devices=3,memory=1MiB,fail=allocate:2,lt=off").status.success());
        let bad = child("devices=many");
        assert!(!bad.status.success() && String::from_utf8_lossy(&bad.stdout).contains("`devices` is `many`"));
        return;
    }
    let rig = Rig::new(MockOptions::from_environment().unwrap());
    assert_eq!((rig.gpu.device_count(), rig.gpu.memory_info(2).unwrap().total), (3, 1 << 20));
    assert!(!rig.gpu.capabilities(0).unwrap().lt_plans);
    rig.allocate(0, 64);
    assert_eq!(kind(rig.gpu.allocate(0, &AllocateOptions::new(64))), ErrorKind::OutOfMemory);
}
