//! Speed of the backend on synthetic weights: `speed CHECKPOINT SCHEME THREADS PP TG DEPTH BATCH [CLASS]`.

use std::sync::Arc;
use std::time::Instant;

use cpu::{Class, Cpu, Options, peaks};
use engine::{Backend, Batch, Input, KvConfig, KvKind, Output, Row, Sample, SamplingParams, Want};
use model::{Checkpoint, Model, Scheme};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args[i].parse::<usize>().unwrap();
    let scheme = match args[1].as_str() {
        "bf16" => Scheme::Bf16,
        "q8_0" => Scheme::Q8_0,
        "q4_1" => Scheme::Q4_1,
        _ => Scheme::Q4_0,
    };
    let (threads, pp, tg, depth, batch) = (number(2), number(3), number(4), number(5), number(6));
    let class = Class::available()[args.get(7).map_or(0, |c| c.parse().unwrap())];
    let start = Instant::now();
    let path = format!("/tmp/cpubench/{}-{}.gguf", args[0], args[1]);
    let path = std::path::Path::new(&path);
    if !path.exists() {
        let checkpoint = Checkpoint::find(&args[0]).unwrap();
        model::synthetic::write(path, checkpoint, (scheme, scheme.default_head()), 7, |_, _| ())
            .unwrap();
    }
    let model = Model::open(path).unwrap();
    let model = Arc::new(model);
    let made = start.elapsed();
    let spec = *model.spec();
    let positions = depth + pp.max(tg) + 64;
    let per = positions.div_ceil(32);
    let kv = KvConfig { blocks: per * batch, kind: KvKind::Bf16 };
    let start = Instant::now();
    let mut cpu =
        Cpu::new(Arc::clone(&model), kv, Options { threads, class }, &mut |_, _| ()).unwrap();
    println!("model {made:?}, packed {} MB in {:?}", cpu.weight_bytes() >> 20, start.elapsed());
    let peaks = peaks::measure(class, threads).unwrap();
    println!("reads {:.1} GB/s, dot {:.0} GOP/s", peaks.read / 1e9, peaks.dot / 1e9);
    let tables: Vec<Vec<u32>> =
        (0..batch).map(|s| (s * per..(s + 1) * per).map(|b| b as u32).collect()).collect();
    let token = |i: usize| Input::Token((i * 7919 % spec.vocab) as u32);
    let mut out = Output::default();
    let mut run = |cpu: &mut Cpu, tables: &[Vec<u32>], position: usize, count: usize| {
        let mut b = Batch::default();
        for table in tables {
            let first = b.push((0..count).map(|i| token(position + i)), position, table);
            let sample = Sample::new(SamplingParams::default(), 0);
            b.rows.push(Row { token: first + count - 1, want: Want::Sample(Box::new(sample)) });
        }
        cpu.forward(&b, &mut out).unwrap();
    };
    for table in &tables {
        let mut at = 0;
        while at < depth {
            let n = 512.min(depth - at);
            run(&mut cpu, std::slice::from_ref(table), at, n);
            at += n;
        }
    }
    let l = &model.weights.layers[0];
    let weights: usize = [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]
        .map(|m| m.rows * m.cols)
        .iter()
        .sum::<usize>()
        * spec.layers;
    let bytes: usize = [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]
        .map(|m| m.bytes().len())
        .iter()
        .sum::<usize>()
        * spec.layers
        + model.weights.head.bytes().len();
    for _ in 0..3 {
        if pp > 0 {
            let start = Instant::now();
            run(&mut cpu, &tables[..1], depth, pp);
            let s = start.elapsed().as_secs_f64();
            let attention = 2 * (2 * depth + pp) * spec.q_width() * spec.layers;
            println!(
                "pp{pp} {:.1} tok/s; weights {:.0} GOP/s ({:.1} % of dot), with attention {:.0}",
                pp as f64 / s,
                (2 * weights * pp) as f64 / s / 1e9,
                (2 * weights * pp) as f64 / s / peaks.dot * 100.0,
                ((2 * weights + attention) * pp) as f64 / s / 1e9,
            );
        }
        if tg > 0 {
            let start = Instant::now();
            for i in 0..tg {
                run(&mut cpu, &tables, depth + i, 1);
            }
            let s = start.elapsed().as_secs_f64() / tg as f64;
            println!(
                "tg{tg} x{batch} {:.1} tok/s; {:.1} GB/s ({:.1} % of reads)",
                batch as f64 / s,
                bytes as f64 / s / 1e9,
                bytes as f64 / s / peaks.read * 100.0
            );
        }
    }
    if let Ok(status) = std::fs::read_to_string("/proc/self/status") {
        for line in status.lines().filter(|l| l.starts_with("VmHWM") || l.starts_with("VmRSS")) {
            println!("{line}");
        }
    }
}
