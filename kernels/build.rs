//! With the feature `cuda`: compiles `cuda/*.cu` with nvcc, one fat binary for each module.
//!
//! `CUDA_COMPUTE_CAP` (default 80) names the oldest GPU that the binaries run on: they hold machine code
//! for it, and PTX that the driver translates for newer ones. nvcc is `$NVCC`, else
//! `$CUDA_HOME/bin/nvcc` (or `CUDA_PATH`, `CUDA_ROOT`), else `nvcc` on the path.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, thread};

include!("head_dims.rs");

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed=head_dims.rs");
    for key in [
        "CUDA_COMPUTE_CAP",
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_ROOT",
    ] {
        println!("cargo:rerun-if-env-changed={key}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut jobs: Vec<(String, &str, Option<usize>)> = vec![
        ("attention_reduce".into(), "attention_reduce.cu", None),
        ("materialize".into(), "materialize.cu", None),
        ("accept".into(), "accept.cu", None),
        ("layer".into(), "layer.cu", None),
        ("product".into(), "product.cu", None),
    ];
    for dim in HEAD_DIMS {
        jobs.push((
            format!("attention_mma_{dim}"),
            "attention_mma.cu",
            Some(dim),
        ));
        jobs.push((
            format!("attention_f32_{dim}"),
            "attention_f32.cu",
            Some(dim),
        ));
    }
    let arch = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| "80".into());
    let arch = arch.replace('.', "");
    println!("cargo:rustc-env=DFLASH_KERNELS_ARCH={arch}");
    let nvcc = find_nvcc();
    let parallel = env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse::<usize>().ok())
        .unwrap_or(1);
    for batch in jobs.chunks(parallel.max(1)) {
        thread::scope(|scope| {
            for (name, source, dim) in batch {
                let (nvcc, arch, out) = (&nvcc, &arch, &out);
                scope.spawn(move || compile(nvcc, arch, out, name, source, *dim));
            }
        });
    }
    write_table(&out, &jobs);
}

fn find_nvcc() -> PathBuf {
    if let Some(nvcc) = env::var_os("NVCC") {
        return nvcc.into();
    }
    ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"]
        .iter()
        .filter_map(env::var_os)
        .map(|home| Path::new(&home).join("bin/nvcc"))
        .find(|nvcc| nvcc.exists())
        .unwrap_or_else(|| "nvcc".into())
}

fn compile(nvcc: &Path, arch: &str, out: &Path, name: &str, source: &str, dim: Option<usize>) {
    let mut command = Command::new(nvcc);
    command
        .args(["-std=c++17", "-O3", "-fatbin"])
        .arg("-gencode")
        .arg(format!("arch=compute_{arch},code=sm_{arch}"))
        .arg("-gencode")
        .arg(format!("arch=compute_{arch},code=compute_{arch}"))
        .arg("-o")
        .arg(out.join(format!("{name}.fatbin")));
    if let Some(dim) = dim {
        command.arg(format!("-DHEAD_DIM={dim}"));
    }
    command.arg(Path::new("cuda").join(source));
    let result = command.output().unwrap_or_else(|error| {
        panic!(
            "the feature `cuda` needs nvcc, but {} did not start: {error}; set NVCC or CUDA_HOME",
            nvcc.display()
        )
    });
    assert!(
        result.status.success(),
        "nvcc failed on cuda/{source} for compute capability {arch}:\n{}{}",
        String::from_utf8_lossy(&result.stdout),
        String::from_utf8_lossy(&result.stderr)
    );
}

/// `fn module_image(name) -> Option<&[u8]>`.
fn write_table(out: &Path, jobs: &[(String, &str, Option<usize>)]) {
    let mut code = String::from(
        "fn module_image(name: &str) -> Option<&'static [u8]> {\n    Some(match name {\n",
    );
    for (name, ..) in jobs {
        code += &format!(
            "        {name:?} => include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\")),\n"
        );
    }
    code += "        _ => return None,\n    })\n}\n";
    fs::write(out.join("modules.rs"), code).expect("OUT_DIR is writable");
}
