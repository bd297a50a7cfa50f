source $(dirname ${BASH_SOURCE[0]})/config_of_another_submission.sh

export DGXSYSTEM=dangling
