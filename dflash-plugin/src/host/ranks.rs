//! Tensor parallelism: every rank holds a part of the target, a whole draft model and the same
//! sequences, and the collectives of a pass wait for all ranks. So what is measured or can fail on one
//! rank alone is decided once, for all: the rows to verify, the drafts, and which sequences speculate.

use candle_core::{DType, Device, Result, Tensor};
use mistralrs_core::Pipeline;
use mistralrs_quant::SumAllReduce;

/// This rank among the others.
pub struct Ranks {
    sum: SumAllReduce,
    count: usize,
    is_first: bool,
    device: Device,
}

impl Ranks {
    /// `None` if the target is in one process.
    ///
    /// # Errors
    /// Those of the host's communicator.
    pub fn of(target: &(dyn Pipeline + Send + Sync)) -> Result<Option<Self>> {
        let Some(mapper) = target.device_mapper() else {
            return Ok(None);
        };
        let comm = mapper.get_comm_for(0)?;
        Ok((comm.world_size() > 1).then(|| Self {
            sum: SumAllReduce::new(&comm),
            count: comm.world_size(),
            is_first: comm.rank() == 0,
            device: target.device(),
        }))
    }

    /// The first rank's number; below 2^24.
    ///
    /// # Errors
    /// Those of the collective.
    pub fn first_number(&self, number: usize) -> Result<usize> {
        let number = Tensor::new(&[number as f32], &self.device)?;
        let number = self.first_values(number)?.to_vec1::<f32>()?[0];
        Ok(number.round() as usize)
    }

    /// The first rank's tokens: u32 `[sequences, drafts]`.
    ///
    /// # Errors
    /// Those of the collective, and on all ranks if `tokens` is one on the first rank. What it is on the
    /// others does not matter.
    pub fn first_tokens(&self, tokens: Result<Tensor>, shape: (usize, usize)) -> Result<Tensor> {
        // The last value says whether there are any.
        let count = shape.0 * shape.1;
        let values = match &tokens {
            Ok(tokens) => {
                let tokens = tokens.to_device(&self.device)?.to_dtype(DType::F32)?;
                let there = Tensor::ones(1, DType::F32, &self.device)?;
                Tensor::cat(&[&tokens.flatten_all()?, &there], 0)?
            }
            Err(_) => Tensor::zeros(count + 1, DType::F32, &self.device)?,
        };
        let values = self.first_values(values)?;
        let there = values.narrow(0, count, 1)?.to_vec1::<f32>()?[0];
        match tokens {
            Err(error) if self.is_first => Err(error),
            _ if there == 0.0 => candle_core::bail!("the first rank has no drafts"),
            _ => values
                .narrow(0, 0, count)?
                .to_dtype(DType::U32)?
                .reshape(shape),
        }
    }

    /// Which of these hold on all ranks.
    ///
    /// # Errors
    /// Those of the collective.
    pub fn on_all(&self, each: impl IntoIterator<Item = bool>) -> Result<Vec<bool>> {
        let each: Vec<f32> = each.into_iter().map(f32::from).collect();
        let ranks = self.sum.sum_all_reduce(&Tensor::new(each, &self.device)?)?;
        let ranks = ranks.to_vec1::<f32>()?.into_iter();
        Ok(ranks.map(|n| n.round() as usize == self.count).collect())
    }

    /// f32; the other ranks add nothing.
    fn first_values(&self, values: Tensor) -> Result<Tensor> {
        let values = match self.is_first {
            true => values,
            false => values.zeros_like()?,
        };
        self.sum.sum_all_reduce(&values.contiguous()?)
    }
}
