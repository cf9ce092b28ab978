#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| highwater_core::fuzzing::state(data));
