//! The speculative method that a binary registers.

use mistralrs_core::{Loader, SpeculativeMethod, SpeculativeOptions};

use super::loader::DFlashLoader;
use crate::fault::{DraftHook, FaultHook, FaultPoint};
use crate::stats::Stats;
use crate::trace::{Observer, PhaseObserver, TapObserver};

/// DFlash, to be given to `mistralrs_cli::run` or to a `LoaderBuilder`.
#[derive(Default)]
pub struct DFlashMethod {
    hooks: Hooks,
}

/// Where a pipeline hooks what it does, and what a test makes it do.
#[derive(Clone, Default)]
pub struct Hooks {
    pub stats: Stats,
    pub observer: Option<Observer>,
    pub phases: Option<PhaseObserver>,
    pub taps: Option<TapObserver>,
    pub fault: Option<FaultHook>,
    pub drafts: Option<DraftHook>,
    /// Fail a step whose KV lengths are wrong (invariant I2) instead of repairing them.
    pub strict: bool,
}

impl Hooks {
    /// An error if the fault hook wants one here.
    pub fn fault_at(&self, point: FaultPoint) -> candle_core::Result<()> {
        if self.goes_wrong_at(point) {
            candle_core::bail!("injected fault at {point:?}");
        }
        Ok(())
    }

    /// Whether the fault hook wants this point to go wrong.
    pub fn goes_wrong_at(&self, point: FaultPoint) -> bool {
        self.fault.as_ref().is_some_and(|hook| hook(point))
    }
}

impl DFlashMethod {
    /// The name that selects the method: `--speculative dflash`, `method = "dflash"`.
    pub const NAME: &'static str = "dflash";

    pub fn new() -> Self {
        Self::default()
    }

    /// Call `observer` after every verified block.
    pub fn with_observer(mut self, observer: Observer) -> Self {
        self.hooks.observer = Some(observer);
        self
    }

    /// Call `observer` with the time of every part of every step: for benchmarks.
    pub fn with_phases(mut self, observer: PhaseObserver) -> Self {
        self.hooks.phases = Some(observer);
        self
    }

    /// Call `observer` with the features of every pass: for tests.
    pub fn with_taps(mut self, observer: TapObserver) -> Self {
        self.hooks.taps = Some(observer);
        self
    }

    /// Let `hook` change the drafts before they are verified: for tests.
    pub fn with_drafts(mut self, hook: DraftHook) -> Self {
        self.hooks.drafts = Some(hook);
        self
    }

    /// Let `hook` make steps fail: for tests.
    pub fn with_fault(mut self, hook: FaultHook) -> Self {
        self.hooks.fault = Some(hook);
        self
    }

    /// Fail a step that finds invariant I2 violated, instead of repairing it: for tests.
    pub fn strict(mut self) -> Self {
        self.hooks.strict = true;
        self
    }

    /// Counters of all models that this method was attached to.
    pub fn stats(&self) -> &Stats {
        &self.hooks.stats
    }
}

impl SpeculativeMethod for DFlashMethod {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn wrap(
        &self,
        target: Box<dyn Loader>,
        options: &SpeculativeOptions,
    ) -> anyhow::Result<Box<dyn Loader>> {
        Ok(Box::new(DFlashLoader::new(
            target,
            options,
            self.hooks.clone(),
        )?))
    }
}
