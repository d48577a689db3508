//! The sampler against its own definition: exact small cases and statistics of many draws.

use std::sync::Arc;

use engine::philox::{philox, unit};
use engine::{Answer, Choice, Sample, Sampler, SamplingParams, Want};

fn choose(sample: Sample, logits: &[f32]) -> Option<Choice> {
    match Sampler::default().answer(&Want::Sample(Box::new(sample)), logits) {
        Answer::Choice(choice) => Some(choice),
        _ => None,
    }
}

fn token(params: &SamplingParams, position: u32, logits: &[f32]) -> u32 {
    choose(Sample::new(params.clone(), position), logits).expect("finite logits").token
}

/// Random logits of a few units' spread.
fn random_logits(seed: u64, vocab: usize) -> Vec<f32> {
    let word = |i: usize| unit(philox(seed, [i as u32, 7, 7, 7])[0]);
    (0..vocab).map(|i| 12.0 * word(i) - 6.0).collect()
}

#[test]
fn greedy_takes_the_best_and_the_lowest_of_equals() {
    let params = SamplingParams::default();
    assert_eq!(token(&params, 0, &[0.0, 3.0, -1.0, 3.0]), 1);
    assert_eq!(token(&params, 0, &[-5.0, -5.0]), 0);
}

/// Case SA-04: multiplied when negative, divided when positive, once a distinct token.
#[test]
fn repetition_penalty_follows_ctrl() {
    let mut sample =
        Sample::new(SamplingParams { repetition_penalty: 2.0, ..Default::default() }, 3);
    sample.history = vec![0, 1, 1];
    sample.prompt = 2;
    // -1 -> -2, 2 -> 1, 0.5 stays: token 1 still wins, and a bias of -0.4 hands it to token 2 only if
    // the penalty left exactly 1.
    assert_eq!(choose(sample.clone(), &[-1.0, 2.0, 0.5]).unwrap().token, 1);
    sample.bias = Arc::new([(1, -0.499)]);
    assert_eq!(choose(sample.clone(), &[-1.0, 2.0, 0.5]).unwrap().token, 1);
    sample.bias = Arc::new([(1, -0.501)]);
    assert_eq!(choose(sample.clone(), &[-1.0, 2.0, 0.5]).unwrap().token, 2);
    sample.bias = Arc::new([(0, 2.999), (1, -9.0), (2, 0.5)]);
    assert_eq!(choose(sample.clone(), &[-1.0, 2.0, 0.5]).unwrap().token, 2);
    sample.bias = Arc::new([(0, 3.001), (1, -9.0), (2, 0.5)]);
    assert_eq!(choose(sample, &[-1.0, 2.0, 0.5]).unwrap().token, 0);
}

/// Frequency counts occurrences in the output, presence whether there is one; the prompt is spared.
#[test]
fn output_penalties_spare_the_prompt() {
    let params =
        SamplingParams { frequency_penalty: 1.0, presence_penalty: 0.5, ..Default::default() };
    let mut sample = Sample::new(params, 4);
    sample.history = vec![0, 0, 1, 1];
    sample.prompt = 2;
    // Token 1 loses 2 + 0.5, token 0 nothing.
    assert_eq!(choose(sample.clone(), &[1.0, 3.49]).unwrap().token, 0);
    assert_eq!(choose(sample, &[1.0, 3.51]).unwrap().token, 1);
}

/// Dividing by a temperature this small would leave no finite logit.
#[test]
fn the_coldest_temperatures_are_greedy() {
    for temperature in [1e-40, 1e-20, 1e-5] {
        let params = SamplingParams { temperature, ..Default::default() };
        assert_eq!(token(&params, 0, &[0.0, 3.0, -1.0]), 1);
    }
}

#[test]
fn mask_and_bias_decide_what_is_possible() {
    let mut sample = Sample::new(SamplingParams::default(), 0);
    sample.mask = Some(Arc::new([0b101]));
    assert_eq!(choose(sample.clone(), &[1.0, 9.0, 2.0]).unwrap().token, 2);
    sample.mask = Some(Arc::new([0]));
    assert!(choose(sample, &[1.0, 9.0, 2.0]).is_none(), "nothing allowed is an error, not token 0");
}

#[test]
fn broken_logits_are_reported() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(choose(Sample::new(SamplingParams::default(), 0), &[0.0, bad]).is_none());
    }
}

#[test]
fn log_probabilities_are_the_models_own() {
    let logits = [1.0, 2.0, 3.0];
    let sum: f32 = logits.iter().map(|l: &f32| l.exp()).sum();
    let mut sample =
        Sample::new(SamplingParams { temperature: 0.3, top_k: 1, ..Default::default() }, 0);
    sample.top = 2;
    sample.bias = Arc::new([(0, 50.0)]);
    let choice = choose(sample, &logits).unwrap();
    assert_eq!(choice.token, 0);
    assert!((choice.logprob - (1.0 - sum.ln())).abs() < 1e-6);
    assert_eq!(choice.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 1]);
    assert!((choice.top[0].1 - (3.0 - sum.ln())).abs() < 1e-6);
}

/// Which tokens can appear is what the filters say, computed here the slow and obvious way.
#[test]
fn filters_keep_exactly_their_sets() {
    let logits = random_logits(1, 40);
    let mut order: Vec<usize> = (0..40).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let temperature = 1.7;
    let weight = |t: usize| f64::from((logits[t] - logits[order[0]]) / temperature).exp();
    let nucleus = |p: f64, among: &[usize]| {
        let total: f64 = among.iter().map(|&t| weight(t)).sum();
        let mut reached = 0.0;
        let mut kept = 0;
        while reached < p * total {
            reached += weight(among[kept]);
            kept += 1;
        }
        among[..kept].to_vec()
    };
    let cases = [
        (SamplingParams { top_k: 5, ..Default::default() }, order[..5].to_vec()),
        (SamplingParams { top_p: 0.8, ..Default::default() }, nucleus(0.8, &order)),
        (SamplingParams { top_k: 9, top_p: 0.7, ..Default::default() }, nucleus(0.7, &order[..9])),
        (
            SamplingParams { min_p: 0.2, ..Default::default() },
            order.iter().copied().filter(|&t| weight(t) >= 0.2).collect(),
        ),
    ];
    for (params, mut expected) in cases {
        let params = SamplingParams { temperature, seed: 11, ..params };
        let mut seen = [false; 40];
        (0..30_000).for_each(|position| seen[token(&params, position, &logits) as usize] = true);
        let seen: Vec<usize> = (0..40).filter(|&t| seen[t]).collect();
        expected.sort_unstable();
        assert_eq!(seen, expected, "{params:?}");
    }
}

/// Draws follow the softmax: chi-square over 60,000 draws, 31 degrees of freedom.
#[test]
fn draws_follow_the_distribution() {
    let logits = random_logits(2, 32);
    let params = SamplingParams { temperature: 1.5, seed: 5, ..Default::default() };
    let weights: Vec<f64> = logits.iter().map(|&l| f64::from(l / 1.5).exp()).collect();
    let total: f64 = weights.iter().sum();
    let draws = 60_000;
    let mut counts = [0u32; 32];
    (0..draws).for_each(|p| counts[token(&params, p, &logits) as usize] += 1);
    let chi: f64 = counts
        .iter()
        .zip(&weights)
        .map(|(&count, weight)| {
            let expected = f64::from(draws) * weight / total;
            (f64::from(count) - expected).powi(2) / expected
        })
        .sum();
    // 99.9 % quantile for 31 degrees of freedom; the seed is fixed, so this never flickers.
    assert!(chi < 61.1, "chi-square {chi}");
}

/// The noise belongs to (seed, position, token): same inputs, same draw; other seed, other draws.
#[test]
fn seeds_reproduce() {
    let logits = vec![0.0; 1000];
    let draw = |seed, position| {
        token(&SamplingParams { temperature: 1.0, seed, ..Default::default() }, position, &logits)
    };
    let first: Vec<u32> = (0..64).map(|p| draw(42, p)).collect();
    assert_eq!(first, (0..64).map(|p| draw(42, p)).collect::<Vec<_>>());
    assert_ne!(first, (0..64).map(|p| draw(43, p)).collect::<Vec<_>>());
    let distinct: std::collections::HashSet<_> = first.iter().collect();
    assert!(distinct.len() > 50, "{} distinct draws of 64", distinct.len());
}

#[test]
fn senseless_parameters_are_named() {
    let bad = |f: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        f(&mut params);
        params.check().expect_err("refused")
    };
    assert!(bad(|p| p.temperature = -1.0).starts_with("temperature:"));
    assert!(bad(|p| p.temperature = f32::NAN).starts_with("temperature:"));
    assert!(bad(|p| p.top_p = 1.5).starts_with("top_p:"));
    assert!(bad(|p| p.top_p = 0.0).starts_with("top_p:"));
    assert!(bad(|p| p.min_p = -1.0).starts_with("min_p:"));
    assert!(bad(|p| p.repetition_penalty = 1e-38).starts_with("repetition_penalty:"));
    assert!(bad(|p| p.repetition_penalty = 0.0).starts_with("repetition_penalty:"));
    assert!(bad(|p| p.presence_penalty = f32::INFINITY).starts_with("presence_penalty:"));
    assert!(SamplingParams::default().check().is_ok());
}
