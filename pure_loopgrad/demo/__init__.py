"""The main job: a reconstruction from an ultrasound array whose loop over elements does not fit in memory."""
