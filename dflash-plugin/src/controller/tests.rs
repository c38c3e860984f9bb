//! The promises of the controller, most of them in simulated runs.

mod simulator;

use super::costs::{Costs, MAX_BATCHES};
use super::{Acceptance, Controller};
use simulator::{
    cpu, gpu, mean_and_worst, quantized_cpu, runs, tokens, Cost, Outcome, Random, World, SEEDS,
};
use std::ops::Range;
use std::time::Duration;

#[test]
fn on_a_cpu_the_best_rows_are_found() {
    for block in [8, 16] {
        let outcomes = runs(&World::new(cpu, block), 500, |_| (1, 0.707));
        let (mean, _) = mean_and_worst(outcomes.iter().map(Outcome::against_best));
        assert!(mean < 1.03, "block {block}: {mean}");
        let plain = outcomes.iter().map(|o| o.against_plain(0..500));
        let (_, worst) = mean_and_worst(plain);
        assert!(worst < 1.0 / 1.8, "block {block}: {worst}");
    }
}

#[test]
fn the_first_steps_of_a_shape_are_not_believed_where_they_are_recorded() {
    let mut controller = Controller::new(4).ignoring_first(3);
    let slow = [1.0, 1.0, 9.0];
    for (rows, fast) in [(1, 0.001), (4, 0.003)] {
        for seconds in slow.into_iter().chain([fast]) {
            controller.observe_step(2, rows, Duration::from_secs_f64(seconds));
        }
    }
    let costs = controller.costs.estimate(2).unwrap();
    assert!((costs[0] - 0.001).abs() < 1e-9, "{costs:?}");
    assert!((costs.last().unwrap() - 0.003).abs() < 1e-9, "{costs:?}");
}

#[test]
fn a_worthless_drafter_costs_next_to_nothing() {
    for (name, cost) in [
        ("cpu", cpu as Cost),
        ("quantized", quantized_cpu),
        ("gpu", gpu),
    ] {
        for batch in [1, 2, 4, 8] {
            let outcomes = runs(&World::new(cost, 16), 1000, |_| (batch, 0.02));
            let of = |steps: Range<usize>| {
                mean_and_worst(outcomes.iter().map(|o| o.against_plain(steps.clone()))).1
            };
            let figures = [0..200, 0..300, 500..1000].map(of);
            assert!(figures[0] < 1.05 && figures[1] < 1.05, "{name} {batch}");
            assert!(figures[2] < 1.02, "{name} {batch}");
        }
    }
}

#[test]
fn where_a_row_costs_a_decode_even_good_drafts_are_left_alone() {
    for p in [0.5, 0.707, 0.85] {
        for block in [8, 16] {
            let outcomes = runs(&World::new(quantized_cpu, block), 300, |_| (1, p));
            let plain = outcomes.iter().map(|o| o.against_plain(0..300));
            let (_, worst) = mean_and_worst(plain);
            assert!(worst < 1.05, "p {p}, block {block}: {worst}");
        }
    }
}

#[test]
fn on_a_gpu_the_whole_block_is_verified() {
    for batch in [1, 4] {
        for (i, outcome) in runs(&World::new(gpu, 16), 500, |_| (batch, 0.85))
            .iter()
            .enumerate()
        {
            let share = outcome.share(50..500, 16..17);
            assert!(share > 0.9, "seed {i}, batch {batch}: {share}");
            assert!(outcome.against_best() < 1.03);
        }
    }
}

#[test]
fn acceptance_that_changes_is_followed_both_ways() {
    let world = World::new(cpu, 16);
    let good = 400..1000;
    let (mut up, mut down) = (0, 0);
    for seed in SEEDS {
        let p = |i| if good.contains(&i) { 0.85 } else { 0.02 };
        let outcome = world.run(seed, 1400, |i| (1, p(i)));
        let drafts = |i: usize| outcome.choices[i] != Some(0);
        up = up.max(
            (400..1000)
                .find(|&i| (i..i + 10).all(drafts))
                .unwrap_or(1000)
                - 400,
        );
        let plain = (1000..1390).find(|&i| !(i..i + 10).any(drafts));
        down = down.max(plain.unwrap_or(1400) - 1000);
        let after = outcome.against_plain(1000..1400);
        assert!(after < 1.05, "{after}");
    }
    // Up: at most the longest wait, and the trial.
    assert!(up < 256 + 20, "{up}");
    assert!(down < 40, "{down}");
}

#[test]
fn a_new_sequence_is_tried_without_waiting_for_the_back_off() {
    let world = World::new(cpu, 16);
    let mut run = world.start(1);
    (0..400).for_each(|_| world.step(&mut run, 1, 0.02));
    run.sequences[0] = Acceptance::new();
    (0..100).for_each(|_| world.step(&mut run, 1, 0.85));
    assert!(run.outcome.share(440..500, 4..17) > 0.9);
}

#[test]
fn noise_and_outliers_do_not_make_it_flap() {
    let noisy = |cost| World {
        noise: 0.3,
        outliers: 0.02,
        ..World::new(cost, 16)
    };
    for (name, cost, p) in [
        ("cpu", cpu as Cost, 0.707),
        ("quantized", quantized_cpu, 0.707),
        ("gpu", gpu, 0.85),
    ] {
        let outcomes = runs(&noisy(cost), 1000, |_| (1, p));
        let best = mean_and_worst(outcomes.iter().map(Outcome::against_best));
        let switches = mean_and_worst(outcomes.iter().map(|o| o.switches() as f64));
        assert!(best.0 < 1.05 && best.1 < 1.15, "{name}: {best:?}");
        assert!(
            switches.0 < 20.0 && switches.1 < 40.0,
            "{name}: {switches:?}"
        );
    }
}

#[test]
fn changing_batches_share_what_is_known() {
    for (name, cost) in [
        ("cpu", cpu as Cost),
        ("quantized", quantized_cpu),
        ("gpu", gpu),
    ] {
        for dwell in [1, 20] {
            let batch = |i: usize| 1 + Random((i / dwell) as u64).below(8);
            let outcomes = runs(&World::new(cost, 16), 2000, |i| (batch(i), 0.707));
            let best = mean_and_worst(outcomes.iter().map(Outcome::against_best));
            let plain = outcomes.iter().map(|o| o.against_plain(0..200));
            let plain = mean_and_worst(plain);
            println!("{name}, dwell {dwell}: {best:.3?} of the best; 200: {plain:.3?}");
            assert!(best.0 < 1.04, "{name}: {best:?}");
            // The worst start there is: eight batch sizes in turn, each sequence a new one.
            assert!(plain.0 < 1.08, "{name}: {plain:?}");
        }
    }
}

#[test]
fn a_slow_first_step_of_each_kind_is_forgiven() {
    let world = World::new(gpu, 16);
    let mut controller = Controller::new(16);
    let mut sequence = Acceptance::new();
    let mut seen = [false; 17];
    let mut last = 0;
    for _ in 0..200 {
        let rows = controller.choose(&[&sequence], 16);
        let slow = if std::mem::replace(&mut seen[rows], true) {
            1.0
        } else {
            200.0
        };
        let time = (world.cost)(1, rows) * slow / 1e3;
        controller.observe_step(1, rows, Duration::from_secs_f64(time));
        sequence.observe(rows - 1, rows - 1);
        controller.observe_acceptance(rows - 1, rows - 1);
        last = rows;
    }
    assert_eq!(last, 16);
}

#[test]
fn a_step_that_fails_is_not_tried_at_once_again() {
    let world = World::new(cpu, 16);
    let mut run = world.start(3);
    (0..100).for_each(|_| world.step(&mut run, 1, 0.02));
    let mut failed = 0;
    for _ in 0..200 {
        let sequence = &run.sequences[0];
        if run.controller.choose(&[sequence], 16) > 1 {
            failed += 1;
        }
        run.controller.observe_step(1, 1, Duration::from_millis(41));
    }
    assert!(failed <= 3, "{failed}");
}

#[test]
fn costs_that_grow_with_the_context_are_followed() {
    let world = World::new(cpu, 16);
    let mut controller = Controller::new(16);
    let (mut sequence, mut random) = (Acceptance::new(), Random(5));
    let (mut time, mut best) = (0.0, 0.0);
    for i in 0..3000 {
        let rows = controller.choose(&[&sequence], 16);
        let longer = 1.0 + f64::from(i % 1000) / 500.0;
        let cost = (world.cost)(1, rows) * longer;
        controller.observe_step(1, rows, Duration::from_secs_f64(cost / 1e3));
        let accepted = (1..rows).take_while(|_| random.unit() < 0.707).count();
        sequence.observe(rows - 1, accepted);
        controller.observe_acceptance(rows - 1, accepted);
        time += cost;
        best += tokens(0.707, rows) * world.best_fixed(1, 0.707) * longer;
    }
    assert!(time / best < 1.05);
}

#[test]
fn positions_never_proposed_follow_those_before() {
    let mut controller = Controller::new(16);
    let mut sequence = Acceptance::new();
    for i in 0..200 {
        let accepted = if i % 2 == 0 { 2 } else { 0 };
        sequence.observe(2, accepted);
        controller.observe_acceptance(2, accepted);
    }
    // 1, 2, 3, 4, 6 rows; the first draft is accepted half of the time, the second then always.
    let tokens = controller.expected_tokens(&[&sequence], 5, 0.0);
    assert!((tokens[1] - 1.5).abs() < 0.1, "{tokens:?}");
    assert!((tokens[2] - 2.0).abs() < 0.15, "{tokens:?}");
    assert!(tokens[4] > 3.0, "{tokens:?}");
}

#[test]
fn candidates_end_with_the_block_size() {
    let of = |block| Costs::new(block).candidates;
    assert_eq!(of(0), [1]);
    assert_eq!(of(1), [1]);
    assert_eq!(of(7), [1, 2, 3, 4, 6, 7]);
    assert_eq!(of(16), [1, 2, 3, 4, 6, 8, 12, 16]);
}

#[test]
fn whatever_is_observed_the_limit_is_kept_and_memory_is_bounded() {
    let mut random = Random(7);
    for _ in 0..20 {
        let block = random.below(40);
        let mut controller = Controller::new(block);
        let mut sequences = vec![Acceptance::new(); 100];
        for _ in 0..300 {
            let batch = random.below(101);
            let views: Vec<&Acceptance> = sequences[..batch].iter().collect();
            let limit = match random.below(10) {
                0 => usize::MAX,
                _ => random.below(block + 2),
            };
            let rows = controller.choose(&views, limit);
            assert!((1..=limit.min(block).max(1)).contains(&rows));
            assert_eq!(controller.rows(), rows);
            let nanos = random.next() >> random.below(64);
            match random.below(4) {
                0 => (),
                1 => controller.observe_step(random.below(300), random.below(50), Duration::MAX),
                2 => controller.observe_step(batch, rows, Duration::ZERO),
                _ => controller.observe_step(batch, rows, Duration::from_nanos(nanos)),
            }
            for sequence in &mut sequences[..batch] {
                let proposed = match random.below(50) {
                    0 => usize::MAX,
                    _ => random.below(50),
                };
                let accepted = random.below(60);
                sequence.observe(proposed, accepted);
                controller.observe_acceptance(proposed, accepted);
            }
        }
        assert!(controller.costs.batches.len() <= MAX_BATCHES);
    }
}

#[test]
fn the_same_observations_give_the_same_rows() {
    let world = World {
        noise: 0.3,
        ..World::new(cpu, 16)
    };
    let run = || world.run(11, 300, |i| (1 + i / 50 % 3, 0.6)).rows;
    assert_eq!(run(), run());
}
