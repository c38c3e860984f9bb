//! `cargo xtask cuda`: cargo with the CUDA toolkit and the feature `cuda`; `cargo xtask gpu-bundle`: what such a build
//! gives, for a machine without Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, ensure, Context, Result};

use crate::process;
use crate::python::Python;

/// CUDA 13.0.2. Every package is pinned: compiler and assembler must be of one release, and the toolkit's own
/// package leaves that open.
const PACKAGES: [&str; 8] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cublas==13.1.0.3",
    "nvidia-curand==10.4.0.35",
];
/// Where it goes, under the repository's cache.
const FOLDER: &str = ".cache/cuda-toolkit-13.0.2";
/// Another place for it.
const FOLDER_VARIABLE: &str = "DFLASH_CUDA_TOOLKIT";
/// The GPU to build for when this machine has none: Hopper.
const DEFAULT_CAP: &str = "90";
/// Beside the CPU build, whose flags differ.
const TARGET: &str = "target/cuda";

include!("../../kernels/head_dims.rs");

/// The toolkit that a build uses.
pub enum Toolkit {
    /// The machine's own: `nvcc` is on the PATH.
    Installed,
    /// Made from PyPI packages.
    Made(PathBuf),
}

impl Toolkit {
    /// The machine's own, or one made under `.cache/`.
    pub fn find(root: &Path) -> Result<Self> {
        if process::output(process::command("nvcc").arg("--version")).is_ok() {
            return Ok(Self::Installed);
        }
        let dir = match std::env::var_os(FOLDER_VARIABLE) {
            Some(dir) => PathBuf::from(dir),
            None => root.join(FOLDER),
        };
        let toolkit = dir.join("nvidia/cu13");
        if !dir.join("complete").is_file() {
            println!(
                "no nvcc on the PATH: making a CUDA 13.0 toolkit in {}",
                dir.display()
            );
            if dir.exists() {
                fs::remove_dir_all(&dir)
                    .with_context(|| format!("cannot replace {}", dir.display()))?;
            }
            Python::find()?.install(&PACKAGES, &dir)?;
            complete(&toolkit)?;
            fs::write(dir.join("complete"), "")
                .context("cannot note that the toolkit is complete")?;
        }
        Ok(Self::Made(toolkit))
    }

    /// `program` of the toolkit.
    pub fn program(&self, name: &str) -> PathBuf {
        match self {
            Self::Installed => name.into(),
            Self::Made(dir) => dir.join("bin").join(name),
        }
    }

    /// Let `command` find the toolkit.
    pub fn apply(&self, command: &mut Command) {
        if std::env::var_os("CUDA_COMPUTE_CAP").is_none() {
            command.env("CUDA_COMPUTE_CAP", compute_cap());
        }
        let Self::Made(dir) = self else { return };
        for name in [
            "CUDA_HOME",
            "CUDA_PATH",
            "CUDA_ROOT",
            "CUDA_TOOLKIT_ROOT_DIR",
        ] {
            command.env(name, dir);
        }
        let (include, lib) = (dir.join("include"), dir.join("lib"));
        let cccl = include.join("cccl");
        prepend(command, "PATH", &[&dir.join("bin")]);
        prepend(command, "CPATH", &[&include, &cccl]);
        prepend(command, "LIBRARY_PATH", &[&lib, &lib.join("stubs")]);
        command.env("NVCC_PREPEND_FLAGS", format!("-I{}", cccl.display()));
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        command.env("RUSTFLAGS", format!("-L native={} {flags}", lib.display()));
    }
}

/// What the packages lack for a linker: names without version, and the driver's library.
fn complete(toolkit: &Path) -> Result<()> {
    let lib = toolkit.join("lib");
    for file in fs::read_dir(&lib).with_context(|| format!("cannot list {}", lib.display()))? {
        let name = file?.file_name();
        let Some((plain, _)) = name.to_str().and_then(|name| name.split_once(".so.")) else {
            continue;
        };
        link(Path::new(&name), &lib.join(format!("{plain}.so")))?;
    }
    link(Path::new("lib"), &toolkit.join("lib64"))?;
    let header = fs::read_to_string(toolkit.join("include/cuda.h")).context("no cuda.h")?;
    let stubs = lib.join("stubs");
    fs::create_dir_all(&stubs)?;
    let source = stubs.join("cuda.c");
    fs::write(&source, driver_stub(&header))?;
    process::output(
        process::command("cc")
            .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
            .arg(stubs.join("libcuda.so"))
            .arg(&source),
    )
    .context("cannot compile the link-time stub of the driver library")?;
    Ok(())
}

#[cfg(unix)]
fn link(to: &Path, at: &Path) -> Result<()> {
    if at.symlink_metadata().is_ok() {
        return Ok(());
    }
    std::os::unix::fs::symlink(to, at).with_context(|| format!("cannot link {}", at.display()))
}

#[cfg(not(unix))]
fn link(_: &Path, at: &Path) -> Result<()> {
    bail!(
        "{}: the toolkit can be made on Linux only; install CUDA and put nvcc on the PATH",
        at.display()
    )
}

/// C source that defines every driver function that the header declares, and every name that it maps one to. For the
/// linker only: the real library comes with the driver.
fn driver_stub(header: &str) -> String {
    let mut names: Vec<&str> = Vec::new();
    for line in header.lines() {
        let words: Vec<&str> = line
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '('))
            .filter(|word| !word.is_empty())
            .collect();
        for word in &words {
            names.extend(
                word.split_once('(')
                    .map(|(name, _)| name)
                    .filter(|n| is_function(n)),
            );
        }
        if line.trim_start().starts_with("#define") || line.trim_start().starts_with("#  define") {
            names.extend(words.iter().skip(1).filter(|word| is_function(word)));
        }
    }
    names.sort_unstable();
    names.dedup();
    names
        .iter()
        .map(|name| format!("int {name}(void) {{ return 999; }}\n"))
        .collect()
}

/// `cuMemAlloc_v2`, but not `cudaMalloc` or `CUresult`.
fn is_function(name: &str) -> bool {
    name.strip_prefix("cu")
        .and_then(|rest| rest.chars().next())
        .is_some_and(|c| c.is_ascii_uppercase())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn prepend(command: &mut Command, name: &str, paths: &[&Path]) {
    let old = std::env::var_os(name).unwrap_or_default();
    let all = paths
        .iter()
        .map(|path| path.to_path_buf())
        .chain(std::env::split_paths(&old));
    if let Ok(joined) = std::env::join_paths(all) {
        command.env(name, joined);
    }
}

/// That of this machine's first GPU, as `90`.
fn compute_cap() -> String {
    let query = ["--query-gpu=compute_cap", "--format=csv,noheader"];
    process::output(process::command("nvidia-smi").args(query))
        .ok()
        .and_then(|text| Some(text.lines().next()?.trim().replace('.', "")))
        .filter(|cap| cap.len() >= 2 && cap.chars().all(|c| c.is_ascii_digit()))
        .unwrap_or_else(|| DEFAULT_CAP.to_owned())
}

/// Cargo with the toolkit, for the CUDA build's own target folder.
fn cargo(root: &Path, toolkit: &Toolkit, args: &[&str]) -> Command {
    let mut command = process::cargo();
    toolkit.apply(&mut command);
    command
        .args(args)
        .arg("--target-dir")
        .arg(root.join(TARGET))
        .current_dir(root);
    command
}

const BUILD: [&str; 5] = ["build", "--locked", "--workspace", "--features", "cuda"];

/// Build the workspace with the feature `cuda`, with further options of `cargo build`.
pub fn build(root: &Path, rest: &[String]) -> Result<()> {
    crate::host::set_up(root, false)?;
    let toolkit = Toolkit::find(root)?;
    process::run(cargo(root, &toolkit, &BUILD).args(rest))?;
    println!("built: {TARGET}/debug/mistralrs");
    Ok(())
}

/// Compile every kernel for these GPUs, and run nothing.
pub fn check_kernels(root: &Path) -> Result<()> {
    const CAPS: [&str; 3] = ["80", "89", "90"];
    let toolkit = Toolkit::find(root)?;
    let kernels: Vec<PathBuf> = fs::read_dir(root.join("kernels/cuda"))
        .context("cannot list kernels/cuda")?
        .map(|file| Ok(file?.path()))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .collect();
    ensure!(!kernels.is_empty(), "there are no kernels in kernels/cuda");
    let out = crate::scratch::Scratch::inside(&root.join("target"), "kernels")?;
    for kernel in &kernels {
        let source = fs::read_to_string(kernel)?;
        let dims = match source.contains("HEAD_DIM") {
            true => HEAD_DIMS.map(Some).to_vec(),
            false => vec![None],
        };
        for (cap, dim) in CAPS
            .iter()
            .flat_map(|cap| dims.iter().map(move |dim| (cap, dim)))
        {
            let mut nvcc = process::command(toolkit.program("nvcc"));
            toolkit.apply(&mut nvcc);
            nvcc.args(["-std=c++17", "-O3", "--cubin", "-Werror", "all-warnings"])
                .arg(format!("-arch=sm_{cap}"))
                .args(dim.map(|dim| format!("-DHEAD_DIM={dim}")))
                .arg("-o")
                .arg(out.path().join("kernel.cubin"))
                .arg(kernel);
            process::output(&mut nvcc)
                .with_context(|| format!("{} does not compile for sm_{cap}", kernel.display()))?;
        }
    }
    println!(
        "{} kernel files compile for sm_{}",
        kernels.len(),
        CAPS.join(", sm_")
    );
    Ok(())
}

/// The programs and tests of a CUDA build, stripped and compressed, in `target/gpu-bundle`.
pub fn bundle(root: &Path, tests: &[String]) -> Result<()> {
    const LIMIT: u64 = 60 << 20;
    crate::host::set_up(root, false)?;
    let toolkit = Toolkit::find(root)?;
    let mut args: Vec<&str> = [
        &BUILD[..],
        &["--bins", "--message-format", "json-render-diagnostics"],
    ]
    .concat();
    for test in tests {
        args.extend(["--test", test]);
    }
    let messages =
        process::output(cargo(root, &toolkit, &args).stderr(std::process::Stdio::inherit()))?;
    let programs: Vec<(String, PathBuf)> = messages.lines().filter_map(executable).collect();
    ensure!(!programs.is_empty(), "the build gave no program");
    let dir = root.join("target/gpu-bundle");
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    let mut tar = process::command("tar");
    tar.arg("-cf")
        .arg(dir.join("bundle.tar"))
        .arg("-C")
        .arg(&dir);
    for (name, program) in &programs {
        let copy = dir.join(name);
        fs::copy(program, &copy).with_context(|| format!("cannot copy {}", program.display()))?;
        process::output(process::command("strip").arg(&copy))?;
        println!(
            "{name:24} {:6.1} MB",
            fs::metadata(&copy)?.len() as f64 / 1e6
        );
        tar.arg(name);
    }
    // The programs have most of their code in common, which only one stream with a long memory sees.
    process::output(&mut tar)?;
    process::output(
        process::command("xz")
            .args(["--x86", "--lzma2=preset=2,dict=384MiB"])
            .arg(dir.join("bundle.tar")),
    )?;
    for (name, _) in &programs {
        fs::remove_file(dir.join(name))?;
    }
    let size = fs::metadata(dir.join("bundle.tar.xz"))?.len();
    println!(
        "{:24} {:6.1} MB: target/gpu-bundle/bundle.tar.xz",
        "packed",
        size as f64 / 1e6
    );
    if size > LIMIT {
        bail!(
            "the bundle is larger than {} MiB: leave tests out",
            LIMIT >> 20
        );
    }
    println!(
        "there: tar -xf bundle.tar.xz; LD_LIBRARY_PATH=/usr/local/cuda/lib64 ./mistralrs serve …"
    );
    Ok(())
}

/// Name and path of a program that cargo says it has built.
fn executable(line: &str) -> Option<(String, PathBuf)> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let path = message["executable"].as_str()?;
    let name = message["target"]["name"].as_str()?;
    Some((name.to_owned(), path.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stub_has_declared_functions_and_the_names_they_are_mapped_to() {
        let header = "CUresult CUDAAPI cuInit(unsigned int Flags);\n\
                      #define cuMemAlloc cuMemAlloc_v2\n\
                      typedef struct CUctx_st *CUcontext;\n\
                      CUresult CUDAAPI cuMemFree(CUdeviceptr dptr); // cudaFree( is another\n";
        let stub = driver_stub(header);
        for name in ["cuInit", "cuMemAlloc_v2", "cuMemFree"] {
            assert!(
                stub.contains(&format!("int {name}(void)")),
                "{name}: {stub}"
            );
        }
        assert!(!stub.contains("cudaFree"), "{stub}");
        assert!(!stub.contains("CUctx"), "{stub}");
    }

    #[test]
    fn programs_are_read_from_cargos_messages() {
        let line = r#"{"reason":"compiler-artifact","target":{"name":"mistralrs"},"executable":"/t/mistralrs"}"#;
        assert_eq!(
            executable(line),
            Some(("mistralrs".into(), "/t/mistralrs".into()))
        );
        assert_eq!(
            executable(r#"{"executable":null,"target":{"name":"x"}}"#),
            None
        );
    }
}
