#!/bin/sh
# A move of mini_swe_agent_guessing.yaml; commands/1 to commands/8 are links to this file.
said=${0##*/}
number=$(cat number)
if [ "$said" -eq "$number" ]; then
    echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
    echo "$said"
elif [ "$said" -lt "$number" ]; then
    echo higher
else
    echo lower
fi
