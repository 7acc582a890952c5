from fivefold.launch.scripts.kubernetes import kubernetes_manifest as kubernetes_manifest
from fivefold.launch.scripts.script import LaunchJob as LaunchJob
from fivefold.launch.scripts.script import LaunchRequest as LaunchRequest
from fivefold.launch.scripts.script import Target as Target
from fivefold.launch.scripts.script import job_of as job_of
from fivefold.launch.scripts.script import known_target as known_target
from fivefold.launch.scripts.slurm import slurm_script as slurm_script
from fivefold.launch.scripts.torchrun import torchrun_script as torchrun_script
