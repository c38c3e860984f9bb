//! Draft passes as CUDA graphs, recorded by the host.

use candle_core::{Device, Result, Tensor, TensorId};
use mistralrs_core::plugin::{can_record, Recording, Recordings};

use crate::draft::Replay;

/// Graphs that are kept.
const MOST: usize = 96;

/// Records what it has seen some times.
pub struct Graphs {
    device: Device,
    recordings: Recordings<Key, Graph>,
}

#[derive(PartialEq, Clone)]
struct Key {
    on: TensorId,
    shapes: Vec<Vec<usize>>,
}

struct Graph {
    recording: Recording<Tensor>,
    /// What the graph reads.
    inputs: Vec<Tensor>,
}

impl Graph {
    fn replay(&mut self, inputs: &[Tensor]) -> Result<Tensor> {
        for (place, input) in self.inputs.iter().zip(inputs) {
            place.slice_set(&input.contiguous()?, 0, 0)?;
        }
        Ok(self.recording.launch()?.clone())
    }
}

impl Graphs {
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            recordings: Recordings::new(MOST),
        }
    }
}

impl Replay for Graphs {
    fn is_on(&self) -> bool {
        can_record(&self.device) && !self.recordings.is_refused()
    }

    fn run(
        &mut self,
        on: TensorId,
        inputs: &[Tensor],
        work: &mut dyn FnMut(&[Tensor]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let shapes = inputs.iter().map(|input| input.dims().to_vec()).collect();
        let key = Key { on, shapes };
        if let Some(graph) = self.recordings.get(&key) {
            match graph.replay(inputs) {
                Ok(out) => return Ok(out),
                Err(error) => {
                    self.recordings.refuse(&error);
                    return work(inputs);
                }
            }
        }
        if !self.recordings.is_due(&key) {
            return work(inputs);
        }
        let placed = inputs
            .iter()
            .map(Tensor::force_contiguous)
            .collect::<Result<Vec<_>>>()?;
        let out = work(&placed)?;
        let recording = Recording::new(&self.device, || work(&placed));
        let recorded = recording.is_ok();
        let graph = recording.map(|recording| Graph {
            recording,
            inputs: placed,
        });
        self.recordings.keep(key.clone(), graph);
        match self.recordings.get(&key).filter(|_| recorded) {
            Some(graph) => Ok(graph.recording.output().clone()),
            None => Ok(out),
        }
    }
}
