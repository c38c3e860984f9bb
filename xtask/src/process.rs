//! Child processes: how they are started, and what is said when one fails.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::process::{Command, Stdio};

use anyhow::{anyhow, bail, Context, Result};

/// A command that does not see the variables `cargo run` set for xtask itself.
///
/// Build scripts (ring's, for one) watch `CARGO_MANIFEST_DIR` and `CARGO_PKG_*`. If they leaked into a nested
/// cargo, `cargo xtask demo` and a plain `cargo build` would rebuild those crates in turn.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(set_by_cargo_run) {
            command.env_remove(name);
        }
    }
    command
}

fn set_by_cargo_run(name: &str) -> bool {
    const EXACT: [&str; 6] = [
        "CARGO_MANIFEST_DIR",
        "CARGO_MANIFEST_PATH",
        "CARGO_BIN_NAME",
        "CARGO_CRATE_NAME",
        "CARGO_PRIMARY_PACKAGE",
        "OUT_DIR",
    ];
    name.starts_with("CARGO_PKG_") || EXACT.contains(&name)
}

/// The cargo that runs xtask, so that one toolchain does everything.
pub fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs with the terminal's own input and output; a non-zero exit is an error that quotes the command.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|e| not_started(command, e))?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

/// Runs quietly and returns stdout; on failure the error carries what the command printed.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| not_started(command, e))?;
    let stdout = String::from_utf8_lossy(&out.stdout).into_owned();
    if !out.status.success() {
        let stderr = String::from_utf8_lossy(&out.stderr);
        bail!(
            "`{}` failed ({})\n{}",
            line(command),
            out.status,
            indent(&format!("{stdout}{stderr}"))
        );
    }
    Ok(stdout)
}

/// Becomes the program (same process id, so Ctrl-C and kill reach it directly).
#[cfg(unix)]
pub fn exec(command: &mut Command) -> Result<()> {
    use std::os::unix::process::CommandExt;
    let error = command.exec();
    Err(not_started(command, error))
}

/// Runs the program and exits with its code.
#[cfg(not(unix))]
pub fn exec(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|e| not_started(command, e))?;
    std::process::exit(status.code().unwrap_or(1));
}

fn not_started(command: &Command, error: std::io::Error) -> anyhow::Error {
    let program = command.get_program().to_string_lossy().into_owned();
    if error.kind() == ErrorKind::NotFound {
        return anyhow!("`{program}` was not found: install it, or put it on the PATH");
    }
    anyhow!(error).context(format!("`{program}` could not be started"))
}

/// The command as one would type it.
fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Two spaces before each non-empty line, for quoting a tool's output in an error.
pub fn indent(text: &str) -> String {
    text.lines()
        .filter(|l| !l.trim().is_empty())
        .map(|l| format!("  {l}"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Where cargo puts what it builds for the repository's workspace.
pub fn target_dir(root: &std::path::Path) -> Result<std::path::PathBuf> {
    let json = output(
        cargo()
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .current_dir(root),
    )?;
    let metadata: serde_json::Value =
        serde_json::from_str(&json).context("`cargo metadata` did not print JSON")?;
    let dir = metadata["target_directory"]
        .as_str()
        .context("`cargo metadata` names no target_directory")?;
    Ok(dir.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_of_the_running_package_are_hidden() {
        assert!(set_by_cargo_run("CARGO_PKG_VERSION"));
        assert!(set_by_cargo_run("CARGO_MANIFEST_DIR"));
        for kept in [
            "CARGO_HOME",
            "CARGO_TARGET_DIR",
            "CARGO_NET_OFFLINE",
            "PATH",
        ] {
            assert!(!set_by_cargo_run(kept), "{kept}");
        }
    }

    #[test]
    fn a_missing_program_is_named_with_what_to_do() {
        let error = run(&mut command("no-such-program-dflash")).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("no-such-program-dflash") && text.contains("install"),
            "{text}"
        );
    }

    #[test]
    fn quoted_output_is_indented_without_blank_lines() {
        assert_eq!(indent("a\n\n b\n"), "  a\n   b");
    }
}
