use super::*;

const CPU: Device = Device::Cpu;

fn to(name: &str) -> HostQuantizer {
    HostQuantizer::choose(Some(name), None, &CPU)
        .unwrap()
        .unwrap()
}

fn refused(option: &str, target: Option<IsqType>) -> String {
    match HostQuantizer::choose(Some(option), target, &CPU) {
        Ok(_) => panic!("{option} was accepted"),
        Err(error) => error.to_string(),
    }
}

fn random(rows: usize, width: usize) -> Tensor {
    Tensor::randn(0f32, 1.0, (rows, width), &CPU).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The layer itself, behind what the core sees.
fn host_layer(quantizer: &HostQuantizer, weight: &Tensor) -> HostLinear {
    let exact = Linear::new(weight.clone(), None);
    let exact = UnquantLinear::new(QuantMethodConfig::Unquantized(exact)).unwrap();
    let guard = QuantizeOntoGuard::new();
    let count = AtomicUsize::new(0);
    let layer = Arc::new(exact).apply_isq(Some(quantizer.to), CPU, &count, None, guard);
    HostLinear(layer.unwrap())
}

#[test]
fn every_type_multiplies_and_takes_the_bytes_that_are_counted() {
    // 576 is no multiple of the K types' 256, and 200 of nothing but 8.
    for width in [768, 576, 200] {
        let (weight, x) = (random(48, width), random(5, width));
        let exact = x.matmul(&weight.t().unwrap()).unwrap();
        for wanted in TYPES {
            let quantizer = to(&wanted.to_string());
            let what = format!("{wanted}, width {width}");
            let counted = quantizer.bytes(48, width, DType::F32);
            let Some(layer) = quantizer.quantize(&weight, None).unwrap() else {
                assert!(matches!(quantizer.stored(width), Stored::Exact), "{what}");
                assert_eq!(counted, 48 * width * 4, "{what}");
                continue;
            };
            let product = layer.forward(&x).unwrap();
            assert_eq!(product.dims(), [5, 48], "{what}");
            let (found, expected) = (flat(&product), flat(&exact));
            let error: f32 = found
                .iter()
                .zip(&expected)
                .map(|(a, b)| (a - b).powi(2))
                .sum();
            let norm: f32 = expected.iter().map(|b| b * b).sum();
            let error = (error / norm).sqrt();
            // Three steps of a type of 2 bits over a normal distribution; zeros would give 1.
            assert!(
                error > 1e-4 && error < 0.5,
                "{what}: relative error {error}"
            );
            // What the host writes to a file is the weight behind a few numbers.
            let written = host_layer(&quantizer, &weight).0.serialize().unwrap().len();
            let head = written.checked_sub(counted);
            assert!(
                head.is_some_and(|head| head < 64),
                "{what}: {counted} bytes counted, {written} written"
            );
        }
    }
}

/// Both factors are rounded to whole steps of 1/127 of the largest of 32 neighbours, and a step is an
/// f16, so no product may be further off than that.
#[test]
fn a_q8_0_product_is_within_half_a_step_of_each_factor() {
    let (weight, x) = (random(32, 576), random(7, 576));
    let layer = to("q8_0").quantize(&weight, None).unwrap().unwrap();
    let found = layer.forward(&x).unwrap().to_vec2::<f32>().unwrap();
    let half_step = |row: &[f32]| -> Vec<f32> {
        let of_block = |block: &[f32]| {
            let largest = block.iter().fold(0f32, |most, v| most.max(v.abs()));
            vec![largest * (0.5 / 127.0 + 1.0 / 2048.0); block.len()]
        };
        row.chunks(32).flat_map(of_block).collect()
    };
    let weight = weight.to_vec2::<f32>().unwrap();
    for (x, found) in x.to_vec2::<f32>().unwrap().iter().zip(&found) {
        for (w, found) in weight.iter().zip(found) {
            let (dx, dw) = (half_step(x), half_step(w));
            let exact: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
            let allowed: f32 = (0..w.len())
                .map(|i| x[i].abs() * dw[i] + w[i].abs() * dx[i] + dw[i] * dx[i])
                .sum();
            assert!((found - exact).abs() <= allowed, "{found} for {exact}");
        }
    }
}

#[test]
fn widths_that_do_not_fit_go_the_hosts_way_and_are_told() {
    assert_eq!(to("q4k").exception(768), None);
    let told = to("q4k").exception(576).unwrap();
    assert!(told.contains("576") && told.contains("q4_1"), "{told}");
    let told = to("q8_0").exception(200).unwrap();
    assert!(told.contains("not at all"), "{told}");
    assert_eq!(to("fp8").exception(200), None);
}

#[test]
fn a_bias_is_added() {
    let (weight, bias, x) = (random(16, 64), random(1, 16), random(3, 64));
    let bias = bias.squeeze(0).unwrap();
    let with = to("q8_0").quantize(&weight, Some(&bias)).unwrap().unwrap();
    let without = to("q8_0").quantize(&weight, None).unwrap().unwrap();
    let expected = without.forward(&x).unwrap().broadcast_add(&bias).unwrap();
    assert_eq!(flat(&with.forward(&x).unwrap()), flat(&expected));
}

#[test]
fn none_is_the_default_and_auto_follows_the_target() {
    let chosen = |option, target| {
        let quantizer = HostQuantizer::choose(option, target, &CPU).unwrap();
        quantizer.map(|quantizer| quantizer.to)
    };
    assert_eq!(chosen(None, Some(IsqType::Q4K)), None);
    assert_eq!(chosen(Some("none"), Some(IsqType::Q4K)), None);
    assert_eq!(chosen(Some("auto"), Some(IsqType::Q4K)), Some(IsqType::Q4K));
    assert_eq!(chosen(Some("auto"), None), None);
    assert_eq!(
        chosen(Some("Q8_0"), Some(IsqType::Q4K)),
        Some(IsqType::Q8_0)
    );
    assert_eq!(chosen(Some("4"), None), Some(IsqType::Q4K)); // the host's short form
    assert_eq!(chosen(Some("fp8"), None), Some(IsqType::F8E4M3));
}

#[test]
fn what_cannot_be_used_is_refused_with_the_option_and_the_types() {
    let parts = [
        "--speculative-draft-quant",
        "draft_quant",
        "none, auto or one of q8_0",
        "q4k",
        "fp8",
    ];
    for (error, found) in [
        (refused("q9", None), "found q9"),
        (refused("", None), "found "),
        (refused("hqq4", None), "found hqq4"),
        (refused("auto", Some(IsqType::AFQ4)), "the target's afq4"),
    ] {
        for part in parts.iter().chain([&found]) {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}
