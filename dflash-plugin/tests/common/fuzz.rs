//! Fuzzing without a nightly compiler: random inputs until the time is up, behind a corpus.
//!
//! - `DFLASH_FUZZ_SECONDS`: time for each target, 5 if not set.
//! - `DFLASH_FUZZ_COLLECT`: a folder to which the smallest input of each outcome is written, to
//!   choose new files for the corpus from.

use std::collections::BTreeMap;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use proptest::strategy::{Strategy, ValueTree};

use super::allocation::peak_of;
use super::property;

/// Slower than this is a failure; a healthy input takes far less than a millisecond.
const SLOW: Duration = Duration::from_secs(2);
/// So often an input must be slow: on a busy machine anything can be, once.
const SLOW_RUNS: usize = 4;
/// After this the process is ended, for a loop without end cannot be interrupted otherwise.
const HANG: Duration = Duration::from_secs(60);
/// Memory that an input may take: so much in any case ...
const FREE_BYTES: usize = 16 << 20;
/// ... and so much for each of its bytes (a JSON value takes more memory than its text).
const BYTES_PER_BYTE: usize = 128;
/// Attempts to make a failing input smaller.
const SHRINK_STEPS: usize = 2_000;

/// What an input led to, in few words: inputs of one outcome took about the same path.
pub type Outcome = String;

/// Where the files of one target are, and what they are called.
pub struct Corpus {
    pub folder: PathBuf,
    pub extension: &'static str,
}

impl Corpus {
    /// All files, in the order of their names.
    pub fn inputs(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let entries = std::fs::read_dir(&self.folder)
            .unwrap_or_else(|error| panic!("{}: {error}", self.folder.display()));
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.retain(|file| file.is_file());
        files.sort();
        let read = |file: PathBuf| (file.clone(), std::fs::read(file).unwrap());
        files.into_iter().map(read).collect()
    }

    fn write(&self, folder: &Path, kind: &str, name: &str, input: &[u8]) -> PathBuf {
        std::fs::create_dir_all(folder).unwrap();
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let file = folder.join(format!("{kind}-{hash:016x}.{}", self.extension));
        std::fs::write(&file, input).unwrap();
        file
    }
}

/// Replays the corpus, then tries inputs of `strategy` until the time is up. `check` returns the
/// outcome, or what is wrong with how the input was handled; it must not panic, take long or
/// allocate much more than the input's size. A failing input is made smaller and kept in the
/// corpus.
pub fn fuzz(
    target: &str,
    corpus: &Corpus,
    strategy: impl Strategy<Value = Vec<u8>>,
    check: impl Fn(&[u8]) -> Result<Outcome, String>,
) {
    let watchdog = Watchdog::start(target);
    let run = |input: &[u8]| watchdog.during(corpus, input, || judge(&check, input, SLOW_RUNS));
    let mut outcomes = BTreeMap::new();
    let files = corpus.inputs();
    for (file, input) in &files {
        match run(input) {
            Ok(outcome) => note(&mut outcomes, outcome, input),
            Err(why) => panic!("{target}: {}: {why}", file.display()),
        }
    }
    let known = outcomes.len();
    let (mut runner, start) = (property::runner(1), Instant::now());
    let mut inputs = 0u64;
    while start.elapsed() < seconds() {
        let mut tree = strategy.new_tree(&mut runner).unwrap();
        inputs += 1;
        let input = tree.current();
        match run(&input) {
            Ok(outcome) => note(&mut outcomes, outcome, &input),
            Err(why) => {
                let (input, why) = shrink(&mut tree, (input, why), run);
                let file = corpus.write(&corpus.folder, "failure", &why, &input);
                panic!("{target}: {}: {why}", file.display());
            }
        }
    }
    println!(
        "fuzz {target}: {inputs} inputs in {:.0} s behind {} corpus files, {} outcomes ({known} by the corpus)",
        start.elapsed().as_secs_f64(),
        files.len(),
        outcomes.len(),
    );
    if let Some(folder) = std::env::var_os("DFLASH_FUZZ_COLLECT") {
        let folder = Path::new(&folder).join(target);
        for (outcome, input) in &outcomes {
            let file = corpus.write(&folder, "outcome", outcome, input);
            println!("{}: {outcome}", file.display());
        }
    }
}

/// A folder in memory where there is one: every input is written to a file.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match tempfile::tempdir_in(memory) {
        Ok(folder) => folder,
        Err(_) => tempfile::tempdir().unwrap(),
    }
}

fn seconds() -> Duration {
    let seconds = match std::env::var("DFLASH_FUZZ_SECONDS") {
        Ok(text) => text.parse().unwrap_or_else(|_| {
            panic!("DFLASH_FUZZ_SECONDS: expected whole seconds, found `{text}`")
        }),
        Err(_) => 5,
    };
    Duration::from_secs(seconds)
}

/// Keeps the smallest input of each outcome.
fn note(outcomes: &mut BTreeMap<Outcome, Vec<u8>>, outcome: Outcome, input: &[u8]) {
    match outcomes.get_mut(&outcome) {
        Some(kept) if kept.len() <= input.len() => (),
        Some(kept) => *kept = input.to_vec(),
        None => drop(outcomes.insert(outcome, input.to_vec())),
    }
}

fn judge(
    check: &impl Fn(&[u8]) -> Result<Outcome, String>,
    input: &[u8],
    slow_runs: usize,
) -> Result<Outcome, String> {
    let start = Instant::now();
    let (result, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| check(input))));
    let time = start.elapsed();
    let outcome = match result {
        Ok(result) => result?,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            return Err(format!("panic: {}", text.unwrap_or_default()));
        }
    };
    if time > SLOW {
        return match slow_runs {
            0 | 1 => Err(format!("slow: {time:?} (ended as: {outcome})")),
            _ => judge(check, input, slow_runs - 1),
        };
    }
    if peak > FREE_BYTES + BYTES_PER_BYTE * input.len() {
        return Err(format!(
            "{peak} bytes allocated for {} bytes of input (ended as: {outcome})",
            input.len()
        ));
    }
    Ok(outcome)
}

fn shrink(
    tree: &mut impl ValueTree<Value = Vec<u8>>,
    mut smallest: (Vec<u8>, String),
    run: impl Fn(&[u8]) -> Result<Outcome, String>,
) -> (Vec<u8>, String) {
    let mut fails = true;
    for _ in 0..SHRINK_STEPS {
        let went_on = if fails {
            tree.simplify()
        } else {
            tree.complicate()
        };
        if !went_on {
            break;
        }
        let input = tree.current();
        let result = run(&input);
        fails = result.is_err();
        if let Err(why) = result {
            smallest = (input, why);
        }
    }
    smallest
}

/// Ends the process when one input takes too long, and keeps that input.
struct Watchdog {
    /// A file to keep an input in and its contents; `None`: the input is done.
    news: mpsc::Sender<Option<(PathBuf, Vec<u8>)>>,
}

impl Watchdog {
    fn start(target: &str) -> Self {
        let (news, heard) = mpsc::channel::<Option<(PathBuf, Vec<u8>)>>();
        let target = target.to_string();
        std::thread::spawn(move || {
            let mut running = None;
            loop {
                match (heard.recv_timeout(HANG), &running) {
                    (Ok(news), _) => running = news,
                    (Err(mpsc::RecvTimeoutError::Timeout), Some((file, input))) => {
                        let _ = std::fs::write(file, input);
                        eprintln!("{target}: {}: no end after {HANG:?}", file.display());
                        std::process::abort();
                    }
                    (Err(mpsc::RecvTimeoutError::Timeout), None) => (),
                    (Err(mpsc::RecvTimeoutError::Disconnected), _) => return,
                }
            }
        });
        Self { news }
    }

    fn during<T>(&self, corpus: &Corpus, input: &[u8], work: impl FnOnce() -> T) -> T {
        let file = corpus.folder.join(format!("hang.{}", corpus.extension));
        let _ = self.news.send(Some((file, input.to_vec())));
        let result = work();
        let _ = self.news.send(None);
        result
    }
}
