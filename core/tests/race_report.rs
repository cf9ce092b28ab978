//! The race finder's report on a program that uses Highwater's types shows the program's own frames first.

use highwater_core::{DeviceBuffer, Runtime, Stream};
use highwater_mock::{MockGpu, MockOptions};

#[inline(never)]
fn put_in(stream: &Stream) -> DeviceBuffer<f32> {
    stream.upload(&[1.0_f32; 100]).unwrap()
}

#[inline(never)]
fn overwrite(stream: &Stream, buffer: &DeviceBuffer<f32>) {
    stream.fill(buffer, 2.0_f32).unwrap();
}

/// The lines below each numbered one.
fn below<'t>(text: &'t str, number: &str) -> Vec<&'t str> {
    let lines = text.lines().skip_while(|line| !line.starts_with(number)).skip(1);
    lines.take_while(|line| line.starts_with("      ")).map(str::trim).collect()
}

#[test]
fn a_report_begins_with_the_frames_of_the_program_and_folds_the_rest() {
    let gpu = MockGpu::open(MockOptions::new().with_race_detector()).unwrap();
    let runtime = Runtime::new(gpu.clone()).unwrap();
    let device = runtime.device(0).unwrap();
    let (uploads, other) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = put_in(&uploads);
    overwrite(&other, &buffer);
    let races = gpu.races();
    let text = races[0].to_string();
    for (number, function) in [("  1. `copy`", "put_in"), ("  2. `fill`", "overwrite")] {
        let lines = below(&text, number);
        let [first, .., last] = &lines[..] else { panic!("{text}") };
        assert!(first.contains(function) && first.contains("race_report.rs:"), "{text}");
        let folded = last
            .strip_prefix("and ")
            .and_then(|rest| rest.strip_suffix(" frames of Highwater and the standard library"));
        assert!(folded.is_some_and(|count| count.parse::<u32>().unwrap() > 5), "{text}");
        // Frames of the program only.
        for line in &lines[..lines.len() - 1] {
            assert!(line.contains("race_report.rs:"), "`{line}` in {text}");
        }
        assert!(lines.len() <= 6, "{text}");
    }
    assert!(
        races[0].first().frames().iter().any(|frame| frame.function.contains("upload")),
        "all are there to be asked for"
    );
}
