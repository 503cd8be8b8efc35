"""The folder of a probe: the names of the files that runner, program and reader agree on."""

TASK, RESULT, BEGIN, END, LOG = "task.json", "result.json", "begin.json", "end.json", "output.log"
NODE_ENDS, NODE_LOGS = "end.node*.json", "output.node*.log"
